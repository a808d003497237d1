"""What the ort engine can answer before it has a model."""

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.factory import Ability, EngineFactory, Report, TrainerParts
from optimum_memopt.engines.api.run import EXPLAIN, Selection
from optimum_memopt.engines.ort.compat import extensions, installation, ortmodule
from optimum_memopt.engines.ort.options import PREFIX, OrtOptions, from_environment
from optimum_memopt.engines.ort.session.graph_plans import check_supported
from optimum_memopt.engines.shared.registry import engine_names, given_flags
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer

NAME = "ort"
# Abilities beyond the engine itself; the first three need the torch extensions.
_NEED_ENGINE = (
    "custom torch.autograd.Function",
    "memory-efficient gradient management",
    "re-entrant activation checkpointing on the ort engine",
    "fp16, bf16 on the ort engine",
    "efficient and flash attention, Triton, tuning",
)


class OrtFactory(EngineFactory[OrtOptions]):
    """The factory of the ort engine. Importing and creating it needs neither onnx nor onnxruntime."""

    allocates_outside_torch = True
    options_to_measure: Mapping[str, bool] = {"ort_fallback": False}

    def missing(self) -> str:
        return installation.missing()

    def declines(self, options: OrtOptions) -> str:
        """Returns why `auto` skips this engine: flags of another engine, or a plan or `--memory_opt_on_oom` that it
        cannot apply; empty if it does not."""
        for other in engine_names():
            if other != NAME and (given := given_flags(options, other)):
                return f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for the {other} engine"
        if options.memory_opt_on_oom != EXPLAIN:
            return f"--memory_opt_on_oom {options.memory_opt_on_oom} needs an engine that can plan for less memory"
        try:
            if (config := options.plan_config) is not None:
                check_supported(config)
        except ConfigError as error:
            return str(error)
        return ""

    def check_options(self, options: OrtOptions) -> None:
        """Refuse options that cannot work here. Under `auto`, plans and `--memory_opt_on_oom` are not checked: another
        engine may support them."""
        if options.memory_opt_engine == NAME and (config := options.plan_config) is not None:
            check_supported(config)
        if options.memory_opt_engine == NAME and options.memory_opt_on_oom != EXPLAIN:
            raise MemOptError(
                f"--memory_opt_on_oom {options.memory_opt_on_oom} with the {NAME} engine: it cannot plan within a "
                "budget; leave out --memory_opt_engine, or give explain"
            )
        options.check_ort()

    def in_force(self, options: OrtOptions, environ: Mapping[str, str]) -> tuple[OrtOptions, tuple[str, ...]]:
        """Returns the options with overrides from ORT's environment variables, and a line for each override. Under
        `auto`, the fallback is another engine instead of plain PyTorch."""
        chosen, remarks = from_environment(options, environ)
        if options.memory_opt_engine != NAME:
            chosen.ort_fallback = False
        return chosen, remarks

    def create(self, options: OrtOptions, selection: Selection) -> Engine:
        from optimum_memopt.engines.ort.engine import OrtEngine

        return OrtEngine(selection, options)

    def trainer_parts(self, trainer: "Trainer", engine: Engine, options: OrtOptions) -> TrainerParts:
        """Returns the parts for `--ort_module_with_loss` and `--ort_fp16_optimizer`.

        Raises:
            MemOptError: the Trainer computes the loss outside of the model; ONNX Runtime is not installed.
        """
        if not options.ort_module_with_loss and not options.ort_fp16_optimizer:
            return TrainerParts()
        from optimum_memopt.engines.ort import checks, optimizers
        from optimum_memopt.engines.shared.label_smoothing import smoothed_by_engine

        if options.ort_module_with_loss:
            checks.check_trainer_loss(trainer)
        return TrainerParts(
            functools.partial(smoothed_by_engine, trainer, engine) if options.ort_module_with_loss else None,
            optimizers.fp16_optimizer_callbacks(trainer) if options.ort_fp16_optimizer else (),
        )

    def environment_report(self) -> Report:
        """Returns installed packages, torch extensions and abilities on this machine; imports onnxruntime-training."""
        installed = {name: _version(name) for name in (*installation.ONNXRUNTIMES, "onnx")}
        compiler, compiler_missing = None, ""
        try:
            compiler = extensions.check_compiler()
        except MemOptError as error:
            compiler_missing = str(error)
        engine = _ort_engine(installed)
        built = {name: str(path) for name, path in (extensions.find() or {}).items()}
        installed |= {"C++ compiler": compiler}
        if not engine.works:
            abilities = (Ability(what, False, "needs the ort engine") for what in _NEED_ENGINE)
            return Report(installed, (engine, *abilities), built=built)
        advice = "--memory_opt_engine ort on a CPU if nothing may be compiled, and for masked LM with few labels"
        return Report(installed, (engine, *_with_engine(compiler_missing)), advice, built)

    def build(self) -> None:
        extensions.build()

    def version_facts(self) -> dict[str, str]:
        """Returns the version of onnxruntime-training, and ORT's variables in the environment."""
        version = installed_version(installation.DISTRIBUTIONS)
        variables = {
            f"{name} in the environment": value
            for name, value in os.environ.items()
            # Ranks may have different cache folders.
            if name.startswith(PREFIX) and name != f"{PREFIX}CACHE_DIR"
        }
        return ({f"version of {version[0]}": version[1]} if version else {}) | variables


def _version(distribution: str) -> str | None:
    installed = installed_version((distribution,))
    return installed and installed[1]


def _ort_engine(versions: Mapping[str, str | None]) -> Ability:
    what, command = "ort engine", installation.install_command(versions, torch.version.cuda)
    if packages := installation.clash(versions):
        why = f"{' and '.join(packages)} are installed together and overwrite each other's files"
        return Ability(what, False, why, command)
    if why := installation.missing():
        return Ability(what, False, why, command)
    try:
        ortmodule.load()
    # A half-installed or overwritten native package can raise anything; the report shows the error.
    except Exception as error:
        library = installation.library_in(str(error))
        needed = installation.library_command(library) if library else command
        return Ability(what, False, f"{type(error).__name__}: {error}".splitlines()[0], needed)
    return Ability(what, True, "onnxruntime-training can be imported")


def _with_engine(compiler_missing: str) -> tuple[Ability, ...]:
    built = (True, "the torch extensions are built", "")
    if not extensions.find():
        why = f"the torch extensions are not built{compiler_missing and ': '}{compiler_missing}"
        built = (False, why, extensions.BUILD_COMMAND)
    halves = (True, "on CUDA devices; on the CPU float32 only", "")
    if not ortmodule.runs_on_gpus():
        halves = (False, "ONNX Runtime's CPU provider trains float32 only", "")
    elif library := installation.missing_library():
        halves = (False, f"{library} of CUDA 11.8 is not found", installation.library_command(library))
    lacking = installation.cuda_missing()
    cuda = (not lacking, lacking or "on CUDA devices", "")
    facts = (built, built, built, halves, cuda)
    return tuple(Ability(what, *fact) for what, fact in zip(_NEED_ENGINE, facts, strict=True))
