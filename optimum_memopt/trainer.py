"""Attaches an engine to a Trainer: checks options, installs callbacks and method wrappers.

The engine is attached inside `create_optimizer`: after `model_init` has built the model and a checkpoint is loaded
into it, and before DDP, DeepSpeed and autocast wrap it (transformers 5.23, `Trainer._prepare_for_training`). Every
`train()` calls `create_optimizer` once, with DeepSpeed twice. Attached earlier, the engine would be lost when
`model_init` silently replaces the model; attached later, autocast would be silently bypassed or ranks would diverge.
The engine is suspended when `train()` ends, even by an error.
"""

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Trainer

from optimum_memopt import distributed
from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.callbacks.reporting import callback_of, removing_hooks
from optimum_memopt.compat.accelerate import leave_out_fsdp_checkpointing
from optimum_memopt.compat.transformers import CHECKPOINTING_FIELDS, checkpoint_layers, outputs_read_by
from optimum_memopt.engines.api.engine import Engine, Run
from optimum_memopt.engines.api.factory import TrainerParts
from optimum_memopt.engines.api.run import REPLAN
from optimum_memopt.engines.shared import optimizers
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import create, factory, registrations
from optimum_memopt.errors import MemOptError, excerpt, line_of
from optimum_memopt.logs import get_logger
from optimum_memopt.oom import guard, replan
from optimum_memopt.oom.guard import MemoryReportCallback
from optimum_memopt.options import MemOptOptions, from_keywords, resolve
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.report.page import Page, training_page, write_training_page
from optimum_memopt.sizes import MIB
from optimum_memopt.trainer_patches import ATTACHMENT, Patch, TrainerPatches
from optimum_memopt.training import batches, fake_run
from optimum_memopt.training.fake_run import PhaseCheckCallback
from optimum_memopt.training.loss_step import NotedLoss


@dataclass(eq=False)
class Attachment:
    """The engine attached to a Trainer and the results of its runs; `trainer.memopt`.

    Attributes:
        options: the options in force, from flags, keywords and the environment.
        patches: the wrappers and callbacks that `attach` installed on the Trainer.
    """

    options: MemOptOptions
    engine: Engine
    plan_stats: PlanStatsCallback
    _trainer: "weakref.ref[Trainer]" = field(repr=False)
    patches: TrainerPatches = field(repr=False)
    _was_detached: bool = field(default=False, repr=False)

    @property
    def table(self) -> PlanTable | None:
        """Returns the plan table; None before the first training step."""
        return self.engine.plans()

    @property
    def measured_peak_mib(self) -> float:
        """Returns the peak of the training run so far in MiB: resident on the CPU, allocated on CUDA; 0 before it."""
        return self.plan_stats.measured_peak_mib

    def _repr_html_(self) -> str:
        if self.table is None:
            return f"<p>{self.engine.name} engine: the plan table is available after the first training step</p>"
        peaks = {"predicted": self.plan_stats.predicted_peak_mib, "measured": self.measured_peak_mib}
        text = ", ".join(f"{kind} peak {peak:.1f} MiB" for kind, peak in peaks.items() if peak)
        return f"<div><p>{text}</p>{self.table._repr_html_()}</div>"

    def save_plan(self, path: Path | str) -> None:
        """Write the active plan for `--memory_opt_plan`, so that a later run applies it without solving.

        If there are several plans (`--memory_opt_variants`), writes the plan for the largest batch.

        Raises:
            MemOptError: no training step has run yet, the engine has no plan files, or the file cannot be written.
        """
        if (plan := self.engine.plan_file()) is None:
            why = "has no plan before the first training step" if self.table is None else "has no plan files"
            raise MemOptError(f"save_plan: nothing to write; the {self.engine.name} engine {why}")
        plan.save(path)

    def report(self, path: Path | str | None = None) -> Page:
        """Returns a page about a training step's memory: its use, the prediction and what plans would save.

        Raises:
            MemOptError: matplotlib or jinja2 is missing, or the file cannot be written.
        """
        if (trainer := self._trainer()) is None:
            raise MemOptError("report: the Trainer no longer exists")
        return training_page(trainer, self.engine, path)

    def detach(self) -> None:
        """Restore the model and free its compiled graphs; the next `train()` compiles again.

        Between two `train()` calls, another `attach` with other options may follow.
        """
        # During a run the Trainer's patches are still in use, so it does not count as detached.
        trainer = self._trainer()
        self._was_detached = trainer is None or engine_of(cast(torch.nn.Module, trainer.model)) is not self.engine
        self.engine.detach()

    @property
    def is_in_use(self) -> bool:
        """True until `detach`, and again from the next training forward on."""
        return not self._was_detached or self.engine.plans() is not None


class MemOptTrainer(Trainer):
    """A Trainer whose model is trained by one of the package's engines; use it with `MemOptTrainingArguments`.

    Attributes:
        memopt: the engine, its plan table and the measured peak.

    Raises:
        MemOptError: the engine does not support the arguments on this machine.
    """

    memopt: Attachment

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        attach(self)


def attach(trainer: Trainer, options: MemOptOptions | None = None, **overrides: Any) -> Attachment:
    """Attach an engine that trains a Trainer's model, in place, in each `train()`; all ranks must call this.

    `train()` restores the model when it ends, even if it failed or was interrupted. Compiled graphs are kept for the
    next `train()` on the same model, until `detach`.

    Args:
        trainer: a Trainer of any class.
        options: options for a Trainer whose arguments are not `MemOptTrainingArguments`.
        overrides: single fields of `MemOptOptions` that override `options` or the Trainer's arguments.

    Raises:
        MemOptError: bad options, options that conflict with the Trainer's arguments, a second `attach`
            without `trainer.memopt.detach()`, a launch of several processes that would each train alone, or ranks
            with different options or software.
    """
    if not isinstance(trainer, Trainer):
        raise MemOptError(
            f"attach takes a transformers Trainer, not {excerpt(type(trainer).__name__)}; for a model without one: "
            "optimum_memopt.optimize(model, …)"
        )
    former: Attachment | None = getattr(trainer, ATTACHMENT, None)
    if former is not None and former.is_in_use:
        raise MemOptError(
            "this Trainer already has an engine, trainer.memopt; to attach another one, first call "
            "trainer.memopt.detach(), but not during training"
        )
    with distributed.stopping_all("before its training"):
        given = _options(trainer.args, options, overrides)
        given.check()
        distributed.check_world(trainer.args.world_size)
        resolved = resolve(given)
        resolved.log()
        chosen = resolved.options
        engine = create(resolved)
        engine.outputs_read_by = outputs_read_by
        loss = NotedLoss(trainer)
        engine.run = _run_of(trainer, loss)
        engine.check_arguments(trainer.args)
        distributed.warn_unsharded(trainer)
        if chosen.memory_opt_optim is not None:
            optimizers.check(chosen.memory_opt_optim, trainer)
        if chosen.group_by_complexity:
            batches.check(trainer.args, trainer.train_dataset)
        if chosen.memory_opt_batch is not None:
            batches.check_micro_batch(trainer)
        # Steps that are likely to fail come before the Trainer is changed.
        if former is not None:
            former.patches.close()
        callbacks = _callbacks(trainer, chosen)
        replans = chosen.memory_opt_on_oom == REPLAN
        callbacks[MemoryReportCallback].replanner = replan.Replanner(engine, trainer) if replans else None
        parts = [factory(each.name).trainer_parts(trainer, engine, chosen) for each in registrations()]
    distributed.check_ranks_agree(distributed.facts(engine.name, chosen))
    get_logger().info(f"engine {engine.name} ({engine.reason})")
    _keep_serialisable(trainer.args, given, overrides)
    with TrainerPatches() as patches:
        patches.put(trainer, Patch.NOTED_LOSS, loss.wrap)
        _put_on(patches, trainer, engine, chosen, callbacks, parts)
        # Keep the patches, unless installing one of them failed.
        own = patches.pop_all()
    attachment = Attachment(chosen, engine, callbacks[PlanStatsCallback], weakref.ref(trainer), own)
    own.put_attachment(trainer, attachment)
    return attachment


def _put_on(
    patches: TrainerPatches,
    trainer: Trainer,
    engine: Engine,
    options: MemOptOptions,
    callbacks: Mapping[type, Any],
    parts: Sequence[TrainerParts],
) -> None:
    """Install callbacks and wrappers on a Trainer; `Patch` defines the order of the wrappers."""
    undo = leave_out_fsdp_checkpointing(trainer)
    if undo is not None:
        patches.callback(undo)
    for part in parts:
        for callback in part.callbacks:
            patches.add_callback(trainer, callback)
        if part.wrap_loss is not None:
            patches.put(trainer, Patch.SMOOTHED_LOSS, part.wrap_loss)
        if part.wrap_norm is not None and hasattr(trainer, Patch.RELEASED_NORM.method):
            patches.put(trainer, Patch.RELEASED_NORM, part.wrap_norm)
    for callback in callbacks.values():
        patches.add_callback(trainer, callback)
        callback.reporter.belongs_to(trainer)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        if options.memory_opt_on_oom == REPLAN:
            patches.put(trainer, Patch.AGREED_FAILURE, partial(guard.agreeing, trainer))
        patches.put(trainer, Patch.FAILED_TOGETHER, partial(distributed.failing_together, trainer))
    patches.put(trainer, Patch.FALLBACK, partial(replan.falling_back, trainer, engine))
    attaching = partial(_attaching, trainer, engine, options.memory_opt_optim, undo is not None)
    patches.put(trainer, Patch.ATTACHED_ENGINE, attaching)
    if options.group_by_complexity:
        grouped = batches.sampler_of(trainer, callbacks[batches.ComplexityCallback])
        patches.put(trainer, Patch.GROUPED_ROWS, lambda _: grouped)
    if options.memory_opt_batch is not None:
        patches.put(trainer, Patch.CHOSEN_MICRO_BATCH, batches.chosen_micro_batch(trainer, options, engine.name))
    if (device := options.memory_opt_dry_run) is not None:
        show = partial(fake_run.show, trainer, device, options.budget, type(trainer).train)
        patches.put(trainer, Patch.DRY_RUN, lambda _: lambda *args, **kwargs: show())
    patches.put(trainer, Patch.REMOVED_HOOKS, removing_hooks(trainer))
    patches.put(trainer, Patch.RELEASED_MODEL, _releasing(trainer, engine, options.memory_opt_report))


def run_summary(trainer: Trainer) -> str:
    """Returns a summary of a finished run of a Trainer with an engine: plans, claimed and measured memory, speed."""
    memopt: Attachment | None = getattr(trainer, ATTACHMENT, None)
    if memopt is None:
        raise MemOptError("run_summary needs a Trainer with an engine; see attach(trainer)")
    table = memopt.table
    speed = "train_samples_per_second"
    speeds = [entry[speed] for entry in trainer.state.log_history if speed in entry]
    on = [f"{plan.config} ({plan.applied_count} of {plan.frequency})" for plan in table.enabled] if table else []
    claimed = "nothing (no step has run)"
    if table:
        claimed = f"{table.claimed_saving_bytes / MIB:.1f} MiB of saved activations, first batch"
    lines = {
        "engine": " ".join((memopt.engine.name, *(table.header[:1] if table else ()))),
        "plans on": ", ".join(on) or "none",
        "claimed saving": claimed,
        **({"predicted peak": f"{predicted:.1f} MiB"} if (predicted := memopt.plan_stats.predicted_peak_mib) else {}),
        "measured peak": f"{memopt.measured_peak_mib:.1f} MiB",
        "samples/s": f"{speeds[-1]:.2f}" if speeds else "unknown",
    }
    return "\n".join(f"{name:<15}{value}" for name, value in lines.items())


def _options(args: Any, options: MemOptOptions | None, overrides: Mapping[str, Any]) -> MemOptOptions:
    """Returns the options given to `attach`, with `overrides` applied; raises MemOptError if they are given twice."""
    if options is not None and not isinstance(options, MemOptOptions):
        raise MemOptError(
            f"attach(trainer, {type(options).__name__}): the second argument is a MemOptOptions; give single options "
            "by name, as in attach(trainer, memory_opt_level=1)"
        )
    if options is not None and isinstance(args, MemOptOptions):
        raise MemOptError(
            f"attach: options are given twice, as {type(options).__name__} and in the Trainer's "
            f"{type(args).__name__}; give only one, or single options by name"
        )
    given = options if options is not None else args
    if not isinstance(given, MemOptOptions):
        # Trainer's own checkpointing becomes level 1.
        asked = (getattr(args, name, False) for name in CHECKPOINTING_FIELDS)
        if not overrides and not any(asked):
            get_logger().warning(
                "attach without a plan: the Trainer's arguments are not MemOptTrainingArguments and no option was "
                "given, so the engine trains the model as it is; attach(trainer, memory_opt_level=1) recomputes "
                "each layer"
            )
        given = MemOptOptions()
    from_keywords(**overrides)
    # A copy of the same class: a subclass may have other defaults.
    chosen = copy.copy(given)
    for name, value in overrides.items():
        setattr(chosen, name, value)
    return chosen


def _keep_serialisable(args: Any, checked: MemOptOptions, overrides: Mapping[str, Any]) -> None:
    """Copy the checked option values back to the Trainer's arguments, which the Trainer and its trackers serialise;
    a `Path` assigned after construction could not be serialised."""
    if isinstance(args, MemOptOptions):
        for option in fields(MemOptOptions):
            if option.name not in overrides:
                setattr(args, option.name, getattr(checked, option.name))


def _callbacks(trainer: Trainer, options: MemOptOptions) -> dict[type, Any]:
    """Returns the enabled callbacks, by class: the Trainer's own if it has one, else a new one."""
    path, log_steps = options.memory_opt_log_file, options.memory_opt_log_steps
    wanted: dict[type, dict[str, Any]] = {PlanStatsCallback: {"path": path}, MemoryReportCallback: {}}
    if options.log_input_density:
        wanted[InputDensityCallback] = {"log_steps": log_steps, "path": path}
    if options.log_memory_phases or options.memory_opt_report is not None:
        wanted[MemoryPhasesCallback] = {"log_steps": log_steps, "path": path}
    if options.group_by_complexity:
        wanted[batches.ComplexityCallback] = {"path": path}
    if options.budget is not None:
        wanted[PhaseCheckCallback] = {"budget": options.budget}
    return {kind: callback_of(trainer, kind) or kind(**arguments) for kind, arguments in wanted.items()}


@contextlib.contextmanager
def _releasing(trainer: Trainer, engine: Engine, report: os.PathLike | str | None) -> Iterator[None]:
    """Run `train()`, then suspend the engine and write the page `report`, if one was requested."""
    failure = ""
    try:
        yield
    except BaseException as error:
        failure = line_of(error)
        raise
    finally:
        engine.suspend()
        if report is not None:
            write_training_page(trainer, engine, report, failure)


def _attaching(
    trainer: Trainer, engine: Engine, optimizer: str | None, checkpoints: bool, create_optimizer: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a `create_optimizer` that first attaches the engine, and creates `optimizer` if one is named.

    Args:
        checkpoints: enable activation checkpointing on the model's layers, since accelerate's own was disabled
            (`leave_out_fsdp_checkpointing`); the engine replaces it.
    """

    def attach_and_create(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        # Outside of `train` the user calls this; `train` will call it again.
        if trainer.is_in_train:
            if checkpoints:
                checkpoint_layers(trainer.model, 1)
            engine.attach(cast(torch.nn.Module, trainer.model))
        if optimizer is not None:
            return optimizers.create(optimizer, trainer, create_optimizer, *args, **kwargs)
        return create_optimizer(*args, **kwargs)

    return attach_and_create


def _run_of(trainer: Trainer, loss: NotedLoss) -> Callable[[], Run]:
    """Returns a function that reads the Trainer's current run; it must not keep the Trainer alive."""
    held = weakref.ref(trainer)
    return lambda: Run() if (alive := held()) is None else replace(batches.run_of(alive), loss=loss)
