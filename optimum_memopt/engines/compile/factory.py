"""What the compile engine answers before it has a model: whether it can work here, predictions, environment report.

The engine's other modules import torch's compilers, whose private names change with each version. They are imported
only once torch is known to be new enough.
"""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from optimum_memopt.compat.installed import installed_version
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.explanations import Explanation, FailedStep
from optimum_memopt.engines.api.factory import Ability, EngineFactory, Report, TrainerParts
from optimum_memopt.engines.api.predictions import (
    ModelOfRun,
    PlannedDevice,
    StepEstimate,
    StepPredictor,
    Way,
    Workload,
)
from optimum_memopt.engines.api.run import REPLAN, Selection
from optimum_memopt.engines.compile.options import MODEL, PLAIN, CompileOptions
from optimum_memopt.errors import MemOptError
from optimum_memopt.sizes import Budget
from optimum_memopt.step_settings import StepSpec

if TYPE_CHECKING:
    from transformers import Trainer

    from optimum_memopt.engines.torch_compat.patches import Patch


_OLDEST_TORCH = "2.9"
_TRITONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")


class CompileFactory(EngineFactory[CompileOptions]):
    """Makes the compile engine, and predicts steps without one."""

    predicts = True

    def missing(self) -> str:
        version = torch.__version__
        if Version(version) < Version(_OLDEST_TORCH):
            return f"torch {version} is older than {_OLDEST_TORCH}; pip install -U torch"
        return ""

    def create(self, options: CompileOptions, selection: Selection) -> Engine:
        from optimum_memopt.engines.compile.train.engine import CompileEngine

        return CompileEngine(
            selection,
            options.memory_opt_compiler,
            loss=options.memory_opt_loss,
            variants=options.memory_opt_variants,
            with_frontier=options.memory_opt_report is not None,
            unit=options.memory_opt_unit,
            releases_gradients=options.memory_opt_release_gradients,
        )

    def check_options(self, options: CompileOptions) -> None:
        """Refuse conflicting flags: variants or a chosen micro-batch without a budget, two different losses, a plan
        file compressed by another flag, released gradients with gradient accumulation or steps that may be rerun."""
        if options.memory_opt_batch is not None and options.memory_opt_budget is None:
            raise MemOptError(
                f"--memory_opt_batch {options.memory_opt_batch} without --memory_opt_budget: the micro-batch is "
                "chosen within a budget; give one, such as 24GiB, 90% or auto"
            )
        if options.memory_opt_variants > 1 and options.memory_opt_budget is None:
            raise MemOptError(
                f"--memory_opt_variants {options.memory_opt_variants} without --memory_opt_budget: variants are plans "
                "within a budget; give one, or leave the flag out"
            )
        if options.memory_opt_release_gradients:
            _check_released(options)
        if options.memory_opt_compress is not None:
            _check_compress(options)
        plans = Selection(config=options.plan_config, strict=options.memory_opt_strict, plan=options.plan_file)
        from optimum_memopt.engines.compile.loss.decide import loss_mode

        loss_mode(plans, options.memory_opt_loss)

    def trainer_parts(self, trainer: "Trainer", engine: Engine, options: CompileOptions) -> TrainerParts:
        """Returns the wrappers of a Trainer: the engine computes label smoothing with the loss, if the Trainer's loss
        is transformers' own, and the norm of released gradients."""
        if engine.name != "compile":
            return TrainerParts()
        parts = TrainerParts(wrap_norm=engine.norm_with if options.memory_opt_release_gradients else None)
        if trainer.label_smoother is None or options.memory_opt_loss == PLAIN:
            return parts
        from transformers import Trainer

        from optimum_memopt.engines.shared.label_smoothing import smoothed_by_engine

        is_stock = type(trainer).compute_loss is Trainer.compute_loss and "compute_loss" not in vars(trainer)
        if is_stock and trainer.compute_loss_func is None:
            return replace(parts, wrap_loss=functools.partial(smoothed_by_engine, trainer, engine))
        return parts

    def environment_report(self) -> Report:
        if why := self.missing():
            return Report({}, (Ability("compile engine", False, why, "pip install -U torch"),))
        return _report()

    def planned_device(self, device: str | None) -> PlannedDevice:
        from optimum_memopt.engines.compile.predict.planned_step import planned_device

        return planned_device(device)

    def estimate(self, workload: Workload, selection: Selection, spec: StepSpec, **asked: Any) -> StepEstimate:
        from optimum_memopt.engines.compile.predict.estimate import estimate

        return estimate(workload, selection, spec, **asked)

    def plain_ways(self, workload: Workload, spec: StepSpec) -> tuple[Way, ...]:
        from optimum_memopt.engines.compile.predict.estimate import plain_ways

        return plain_ways(workload, spec)

    def explain(self, failed: FailedStep) -> Explanation:
        from optimum_memopt.engines.compile.predict.explain import explain

        return explain(failed)

    def predict_steps(self, workload: Workload | ModelOfRun, options: CompileOptions, spec: StepSpec) -> StepPredictor:
        from optimum_memopt.engines.compile.predict.micro_batches import of_model, of_workload

        budget = options.budget
        assert budget is not None
        spec, compresses = replace(spec, unit=options.memory_opt_unit), options.memory_opt_compress is not None
        if isinstance(workload, ModelOfRun):
            may_chunk = options.memory_opt_loss != PLAIN and not workload.reads_logits
            return of_model(workload, budget, spec, may_chunk, compresses)
        return of_workload(workload, budget, spec, compresses)

    def largest_batch(self, workload: Workload, selection: Selection, spec: StepSpec, budget: Budget) -> int:
        from optimum_memopt.engines.compile.predict.estimate import largest_batch

        return largest_batch(workload, selection, spec, budget)


def _check_released(options: CompileOptions) -> None:
    """Raise MemOptError for flags that need all gradients of a step at once, or a step that can be rerun."""
    flag = "--memory_opt_release_gradients"
    if options.memory_opt_unit == MODEL:
        raise MemOptError(
            f"{flag} with --memory_opt_unit {MODEL}: one graph returns all gradients at once; leave the unit out"
        )
    if options.memory_opt_on_oom == REPLAN:
        raise MemOptError(
            f"{flag} with --memory_opt_on_oom {REPLAN}: a step that has begun to change parameters cannot be "
            "rerun; leave one of the two out"
        )
    if options.memory_opt_batch is not None:
        raise MemOptError(
            f"{flag} with --memory_opt_batch {options.memory_opt_batch}, which may choose gradient accumulation; "
            "leave one of the two out"
        )


def _check_compress(options: CompileOptions) -> None:
    """Raise MemOptError if a plan file is given, which already says what is compressed."""
    flag = f"--memory_opt_compress {options.memory_opt_compress}"
    if options.memory_opt_plan is not None:
        raise MemOptError(
            f"{flag} with --memory_opt_plan: the file already says what is compressed; leave the flag out"
        )


def _report() -> Report:
    from optimum_memopt.engines.compile.capture.backend import default_compiler, missing_for
    from optimum_memopt.engines.torch_compat import releases

    triton = installed_version(_TRITONS)
    installed = {"triton": triton and triton[1]}
    devices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices.append(accelerator.type)
    abilities = (
        Ability("compile engine", True, f"torch {torch.__version__}: plans, levels, offload, predicted peaks"),
        Ability(
            "compiler aot_eager",
            True,
            "PyTorch's operators one by one, gradients bitwise PyTorch's; needs no compiler",
        ),
        *(_inductor(device, *missing_for(device)) for device in devices),
        Ability("bf16, fp16 on the compile engine", True, "bf16 on every device, fp16 on a GPU"),
        _offload(devices),
        Ability("attention kernels", True, "; ".join(_attention(device) for device in devices)),
        *map(_patched, releases.PATCHES),
    )
    compiler, reason = default_compiler(devices[-1])
    return Report(
        installed,
        abilities,
        f"recommended: --memory_opt_engine compile, for every model that torch can trace; on {_name(devices[-1])} it "
        f"uses --memory_opt_compiler {compiler} by default ({reason})",
    )


def _patched(patch: "Patch") -> Ability:
    why = patch.problem()
    return Ability(patch.subject, not why, why or f"tested with {patch.package} {patch.tested}")


def _name(device: str) -> str:
    if device == "cpu":
        return "the CPU"
    return f"{torch.cuda.get_device_name()} ({device})" if device == "cuda" else device


def _inductor(device: str, lacking: str, command: str) -> Ability:
    return Ability(f"compiler inductor on {_name(device)}", not lacking, lacking or "kernels of its own", command)


def _offload(devices: list[str]) -> Ability:
    what = "offload to the host (strategy 3)"
    if len(devices) > 1:
        return Ability(what, True, f"from {_name(devices[-1])}")
    return Ability(what, False, "torch sees no GPU; on a CPU saved activations are already in host memory")


def _attention(device: str) -> str:
    kernels = {"math": True, "flash": True}
    if device == "cuda":
        kernels["flash"] = torch.backends.cuda.is_flash_attention_available()
        kernels |= {"memory-efficient": True, "cuDNN": torch.backends.cudnn.is_available()}
    return f"torch's {', '.join(name for name, is_there in kernels.items() if is_there)} on {_name(device)}"
