"""Defines `optimize`, which attaches an engine to a model in a training loop without a Trainer."""

import weakref
from dataclasses import fields
from typing import Any

import torch

from optimum_memopt import distributed
from optimum_memopt.callbacks.plan_stats import tables_shown
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.run import EngineOptions, Run
from optimum_memopt.engines.shared.forward_patch import training_forward
from optimum_memopt.engines.shared.registry import create, registrations
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.logs import get_logger
from optimum_memopt.options import MemOptOptions, RunOptions, from_keywords, resolve
from optimum_memopt.plans.table import PlanTable

# Options that `optimize` cannot use, since it sees neither batches nor steps.
_OF_ENGINES = {option.name for option in fields(EngineOptions)}
_OF_RUNS = (option.name for option in fields(RunOptions) if option.name not in _OF_ENGINES)
_NEED_A_TRAINER = (*_OF_RUNS, "memory_opt_on_oom", "memory_opt_report")


def optimize(
    model: torch.nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    gradient_accumulation: bool = False,
    **options: Any,
) -> Engine:
    """Attach an engine that trains a model, in place, in a training loop without a Trainer.

    The first training forward logs the plan table; from then on the engine's `plans()` returns it. `detach()` restores
    the model.

    Args:
        model: the model on its device, in its final dtype, not yet wrapped by DDP or the like.
        optimizer: the model's optimizer, for budgets and predicted peaks; None: an AdamW before its first step.
        gradient_accumulation: whether gradients of several micro-batches are summed.
        options: fields of `MemOptOptions`.

    Raises:
        MemOptError: bad options, or a model that the engine cannot train. Raised by the optimizer's first step: the
            model's forward, to which the plan applies, has not run.
    """
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise MemOptError(f"optimizer must be a torch.optim.Optimizer, not {excerpt(type(optimizer).__name__)}")
    if not isinstance(model, torch.nn.Module):
        raise MemOptError(
            f"optimize takes a torch.nn.Module, not {excerpt(type(model).__name__)}; for a Trainer: "
            "optimum_memopt.attach(trainer, …)"
        )
    chosen = from_keywords(**options)
    chosen.check()
    defaults = MemOptOptions()
    names = (*_NEED_A_TRAINER, *(name for registration in registrations() for name in registration.need_trainer))
    if given := [f"--{name}" for name in names if getattr(chosen, name) != getattr(defaults, name)]:
        raise MemOptError(
            f"{', '.join(given)} {'needs' if len(given) == 1 else 'need'} a Trainer: see optimum_memopt.attach; "
            "optimize() gets only the model"
        )
    resolved = resolve(chosen)
    resolved.log()
    engine = create(resolved)
    # The engine must not keep the optimizer alive.
    held = weakref.ref(optimizer) if optimizer is not None else lambda: None
    engine.run = lambda: Run(held(), gradient_accumulation, has_trainer=False)
    engine.attach(model)
    get_logger().info(f"engine {engine.name} ({engine.reason})")
    _wrap_forwards(model, engine, resolved.options)
    if optimizer is not None:
        _check_first_step(optimizer, engine, model)
    return engine


def _check_first_step(optimizer: torch.optim.Optimizer, engine: Engine, model: torch.nn.Module) -> None:
    """Check, before the optimizer's first step with a gradient of the model, that the engine has run. The optimizer
    may also train other models."""
    held, of_model = weakref.ref(engine), weakref.ref(model)
    is_checked = False

    # The hook does not remove itself: torch iterates over the hooks, and raises if their number changes meanwhile.
    def check(stepping: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal is_checked
        own = of_model()
        if is_checked or own is None or all(each.grad is None for each in own.parameters()):
            return
        is_checked = True
        if (attached := held()) is not None:
            attached.check_used()

    optimizer.register_step_pre_hook(check)


def _wrap_forwards(model: torch.nn.Module, engine: Engine, options: MemOptOptions) -> None:
    """Log each new plan table after its first training forward, as PlanStatsCallback does in a Trainer.

    Before the first forward of a sharded model (FSDP2, ZeRO 3), compare the options of all ranks, which would deadlock
    if they differed. The check runs this late because the model may still be sharded after `optimize`.
    """
    patch = training_forward(model)
    train = patch.train
    # With several kinds of batches, their tables alternate.
    shown: list[PlanTable] = []
    is_first = True
    assert train is not None

    def train_and_show(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first and distributed.gathers_parameters(model):
            distributed.check_ranks_agree(distributed.facts(engine.name, options))
        is_first = False
        outputs = train(*args, **kwargs)
        if (table := engine.plans()) is not None and not any(each is table for each in shown):
            shown.append(table)
            tables_shown[model] = table
            get_logger().info(str(table))
        return outputs

    patch.train = train_and_show
