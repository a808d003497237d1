"""Puts an engine and the callbacks into a Trainer. The only file that knows the Trainer's private order of calls.

The model is taken over inside `create_optimizer`. Of all places that is the one after `model_init` has made the model
anew and a checkpoint is loaded into it, and before DDP, DeepSpeed and autocast wrap it (transformers 5.23, `Trainer.
_prepare_for_training`); DeepSpeed calls it twice, every `train()` once. Earlier, `model_init` silently replaces the
wrapped model; later, autocast is silently bypassed or ranks go separate ways.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.engines import base
from optimum_memopt.engines.base import Engine
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger, set_log_level
from optimum_memopt.memory import MIB
from optimum_memopt.options import MemOptOptions
from optimum_memopt.plans.table import PlanTable


@dataclass(frozen=True)
class Attachment:
    """What `attach` put into a Trainer; `trainer.memopt`."""

    options: MemOptOptions
    engine: Engine
    plan_stats: PlanStatsCallback

    @property
    def table(self) -> PlanTable | None:
        """The plan table, None before the first training step."""
        return self.engine.plans()

    @property
    def measured_peak_mib(self) -> float:
        """Peak of the training run so far in MiB: resident on the CPU, allocated on CUDA; 0 before it."""
        return self.plan_stats.measured_peak_mib

    def detach(self) -> None:
        """Give the model back; the next `train()` attaches it again."""
        self.engine.detach()


class MemOptTrainer(Trainer):
    """A Trainer whose model is trained by one of the package's engines; use it with `MemOptTrainingArguments`.

    Attributes:
        memopt: the engine, its plan table and the measured peak.

    Raises:
        MemOptError: the arguments ask for what the engine cannot do on this machine.
    """

    memopt: Attachment

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self)


def attach(trainer: Trainer, **options: Any) -> Attachment:
    """Give a Trainer an engine, in place; its model is taken over when training begins.

    Args:
        trainer: of any class; without `options`, its arguments must be `MemOptTrainingArguments`.
        options: fields of `MemOptOptions`, for a Trainer with plain arguments.

    Raises:
        MemOptError: bad options, options that do not go with the Trainer's arguments, or a second `attach`.
    """
    if hasattr(trainer, "memopt"):
        raise MemOptError("this Trainer has an engine already; use its trainer.memopt")
    chosen = MemOptOptions(**options) if options or not isinstance(trainer.args, MemOptOptions) else trainer.args
    chosen.check()
    set_log_level(chosen.memory_opt_log_level)
    name, reason = base.resolve(chosen.memory_opt_engine)
    engine = base.create(chosen)
    engine.check_arguments(trainer.args)
    get_logger().info(f"engine {name} ({reason})")

    plan_stats = _callback(trainer, PlanStatsCallback, path=chosen.memory_opt_log_file)
    for wanted, kind in (
        (chosen.log_input_density, InputDensityCallback),
        (chosen.log_memory_phases, MemoryPhasesCallback),
    ):
        if wanted:
            _callback(trainer, kind, log_steps=chosen.memory_opt_log_steps, path=chosen.memory_opt_log_file)
    trainer.create_optimizer = _attaching(trainer, engine)
    trainer.memopt = Attachment(chosen, engine, plan_stats)
    return trainer.memopt


def optimize(model: torch.nn.Module, **options: Any) -> Engine:
    """Give a model an engine, in place, for a training loop without a Trainer.

    Args:
        model: on its device, in its final dtype, before DDP or another wrapper goes around it.
        options: fields of `MemOptOptions`.

    Returns:
        The engine: `plans()` after the first training forward, `detach()` at the end.

    Raises:
        MemOptError: bad options, or a model that the engine cannot train.
    """
    chosen = MemOptOptions(**options)
    chosen.check()
    set_log_level(chosen.memory_opt_log_level)
    engine = base.create(chosen)
    engine.attach(model)
    return engine


def run_summary(trainer: Trainer) -> str:
    """A few lines for the end of a run: engine, plans, claimed and measured memory, speed.

    Raises:
        MemOptError: the Trainer has no engine.
    """
    memopt: Attachment | None = getattr(trainer, "memopt", None)
    if memopt is None:
        raise MemOptError("run_summary needs a Trainer with an engine; see attach(trainer)")
    table = memopt.table
    speeds = [entry["train_samples_per_second"] for entry in trainer.state.log_history if "train_runtime" in entry]
    on = [f"{plan.config} ({plan.applied_count} of {plan.frequency})" for plan in table.enabled] if table else []
    claimed = f"{table.claimed_saving_bytes / MIB:.1f} MiB" if table else "nothing (no step has run)"
    lines = {
        "engine": " ".join((memopt.engine.name, *(table.header if table else ()))),
        "plans on": ", ".join(on) or "none",
        "claimed saving": f"{claimed} of stashed activations, first batch",
        "measured peak": f"{memopt.measured_peak_mib:.1f} MiB",
        "samples/s": f"{speeds[-1]:.2f}" if speeds else "unknown",
    }
    return "\n".join(f"{name:<15}{value}" for name, value in lines.items())


def _callback(trainer: Trainer, kind: type, **arguments: Any) -> Any:
    """The Trainer's own callback of this kind where the user gave one, else a new one."""
    present = next((one for one in trainer.callback_handler.callbacks if isinstance(one, kind)), None)
    if present is None:
        present = kind(**arguments)
        trainer.add_callback(present)
    return present


def _attaching(trainer: Trainer, engine: Engine) -> Any:
    create_optimizer = trainer.create_optimizer

    @functools.wraps(create_optimizer)
    def attach_and_create(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if base.engine_of(trainer.model) is not engine:
            engine.detach()
        engine.attach(trainer.model)
        return create_optimizer(*args, **kwargs)

    return attach_and_create
