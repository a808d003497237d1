"""What can be asked of the ort engine before it has a model; works without onnx and onnxruntime."""

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.factory import EngineFactory, Report, TrainerParts
from optimum_memopt.engines.api.options import EXPLAIN
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort import env_options, extensions, installed
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.ort.selection import check_supported
from optimum_memopt.engines.shared.registry import engine_names, given_flags
from optimum_memopt.errors import MemOptError
from optimum_memopt.installed import installed_version
from optimum_memopt.plans.grammar import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer

NAME = "ort"
_PER_RANK_VARIABLES = frozenset({"ORTMODULE_CACHE_DIR"})


class OrtFactory(EngineFactory[OrtOptions]):
    """Makes the ort engine, and says whether it works here."""

    allocates_outside_torch = True
    options_to_measure: Mapping[str, bool] = {"ort_fallback": False}

    def missing(self) -> str:
        """Why this engine cannot work here and how to get it; empty when it can."""
        return installed.missing()

    def declines(self, options: OrtOptions) -> str:
        """Flags of another engine, or a plan that ONNX Runtime cannot apply."""
        for other in engine_names():
            if other != NAME and (given := given_flags(options, other)):
                return f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for the {other} engine"
        if options.memory_opt_on_oom != EXPLAIN:
            return f"--memory_opt_on_oom {options.memory_opt_on_oom} needs a plan for less memory"
        try:
            if (config := options.plan_config) is not None:
                check_supported(config)
        except ConfigError as error:
            return str(error)
        return ""

    def check_options(self, options: OrtOptions) -> None:
        """See `EngineFactory.check_options`; under `auto` another engine may take a plan that this one cannot."""
        if options.memory_opt_engine == NAME and (config := options.plan_config) is not None:
            check_supported(config)
        if options.memory_opt_engine == NAME and options.memory_opt_on_oom != EXPLAIN:
            raise MemOptError(
                f"--memory_opt_on_oom {options.memory_opt_on_oom} with the {NAME} engine: it cannot plan within a "
                "budget; leave out --memory_opt_engine, or give explain"
            )
        options.check_ort()

    def in_force(self, options: OrtOptions, environ: Mapping[str, str]) -> tuple[OrtOptions, tuple[str, ...]]:
        """The options as ORT's variables change them; under `auto` another engine is the fallback."""
        chosen, remarks = env_options.from_environment(options, environ)
        if options.memory_opt_engine != NAME:
            chosen.ort_fallback = False
        return chosen, remarks

    def create(self, options: OrtOptions, selection: Selection) -> Engine:
        """An engine, not yet attached. Raises ConfigError for a plan that ONNX Runtime cannot apply."""
        from optimum_memopt.engines.ort.engine import OrtEngine

        return OrtEngine(selection, options, options.memory_opt_log_level)

    def trainer_parts(self, trainer: "Trainer", engine: Engine, options: OrtOptions) -> TrainerParts:
        """`--ort_module_with_loss` and `--ort_fp16_optimizer`.

        Raises:
            MemOptError: a loss that the model does not know; no ONNX Runtime.
        """
        if not options.ort_module_with_loss and not options.ort_fp16_optimizer:
            return TrainerParts()
        from optimum_memopt.engines.ort import fp16_optimizer, trainer_loss
        from optimum_memopt.engines.shared.label_smoothing import smoothed_by_engine

        if options.ort_module_with_loss:
            trainer_loss.check(trainer)
        if options.ort_fp16_optimizer:
            fp16_optimizer.check()
        return TrainerParts(
            functools.partial(smoothed_by_engine, trainer, engine) if options.ort_module_with_loss else None,
            fp16_optimizer.callbacks(trainer) if options.ort_fp16_optimizer else (),
        )

    def environment_report(self) -> Report:
        """Packages that clash, the torch extensions, devices; imports onnxruntime-training."""
        from optimum_memopt.engines.ort.environment import report

        return report()

    def build(self) -> None:
        """Compile ONNX Runtime's two torch extensions. Raises MemOptError."""
        extensions.build()

    def version_facts(self) -> dict[str, str]:
        """The version of onnxruntime-training, and ORT's variables in the environment."""
        version = installed_version(installed.DISTRIBUTIONS)
        variables = {
            f"{name} in the environment": value
            for name, value in os.environ.items()
            if name.startswith(env_options.PREFIX) and name not in _PER_RANK_VARIABLES
        }
        return ({f"version of {version[0]}": version[1]} if version else {}) | variables
