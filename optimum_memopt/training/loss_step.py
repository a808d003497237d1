"""The loss of a Trainer's steps, where it computes more than the model's own: noted while a step computes it, and
computed again on tensors without data for what it takes beside the model's forward."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.engines.api.run import LossStep
from optimum_memopt.engines.shared.forward_patch import Attribute
from optimum_memopt.training import compat_dry_run
from optimum_memopt.training.fake_run import held_by, holders_of, is_sharded, left_as_it_is


class NotedLoss:
    """Notes what a Trainer's `compute_loss` is called with, until an engine has asked for its loss."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        self._step: LossStep | None = None
        # Of the call that runs.
        self._make: Callable[[], LossStep | None] | None = None

    def wrap(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """`compute_loss` that is noted in training."""

        def compute(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step is not None or not torch.is_grad_enabled():
                return compute_loss(model, inputs, *args, **kwargs)
            # A copy, since it may take some of them out.
            given = dict(inputs) if isinstance(inputs, dict) else inputs
            self._make = partial(self._made, partial(_computed, compute_loss, args, kwargs), given, compute_loss)
            try:
                return compute_loss(model, inputs, *args, **kwargs)
            finally:
                self._make = None

        return compute

    def __call__(self) -> LossStep | None:
        """Returns the loss of the step that runs; None where it is the model's own, or no step runs."""
        if self._step is None and self._make is not None:
            self._step = self._make()
        return self._step

    def _made(self, compute: Callable[..., Any], inputs: Any, compute_loss: Callable[..., Any]) -> LossStep | None:
        trainer = self._trainer()
        name = "" if trainer is None else _name(trainer, compute_loss)
        if trainer is None or not name:
            return None
        if unknown := _unknown(trainer):
            return LossStep(name, unknown)
        held = weakref.ref(trainer)
        return LossStep(name, "", inputs, partial(compute, held), partial(_modules, held), partial(_prepared, held))


def _name(trainer: Any, compute_loss: Callable[..., Any]) -> str:
    """The name of what computes a Trainer's loss; empty where the model's forward does."""
    if getattr(compute_loss, "__func__", None) is not Trainer.compute_loss:
        return f"{type(trainer).__name__}.compute_loss"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    return "the Trainer's label smoother" if trainer.label_smoother is not None else ""


def _unknown(trainer: Any) -> str:
    """Why a Trainer's loss must not be computed once more; empty where it may."""
    if is_sharded(trainer):
        return "the model is sharded"
    if trainer.args.n_gpu > 1:
        return "several GPUs in one process"
    # What is taken from it is gone.
    iterators = (name for name, value in vars(trainer).items() if isinstance(value, Iterator))
    return next((f"it may take from {name}, an iterator" for name in iterators), "")


def _computed(
    compute_loss: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: Callable[[], Any],
    inputs: Any,
) -> torch.Tensor:
    """The loss of inputs without data."""
    trainer = held()
    with trainer.compute_loss_context_manager():
        loss = compute_loss(trainer.model, inputs, *args, **kwargs)
    return loss[0] if isinstance(loss, tuple) else loss


def _modules(held: Callable[[], Any]) -> list[torch.nn.Module]:
    return [value for value in holders_of(held()) if isinstance(value, torch.nn.Module)]


@contextlib.contextmanager
def _prepared(held: Callable[[], Any]) -> Iterator[None]:
    """Within it a Trainer computes a loss without a trace, and alone."""
    trainer, accelerator = held(), held().accelerator
    parts = {id(part): part for module in _modules(held) for part in module.modules()}.values()
    attributes = [
        each for part in parts for each in Attribute.all_of(part) if not isinstance(each.value, torch.Tensor)
    ]
    owners = [value for value in (*held_by(trainer), *trainer.callback_handler.callbacks) if _has_state(value)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_as_it_is(trainer, owners))
        stack.callback(_restore, attributes)
        stack.enter_context(compat_dry_run.alone())
        stack.enter_context(compat_dry_run.longest_generation(contextlib.nullcontext))
        # A new one would have its scale without data.
        stack.callback(functools.partial(setattr, accelerator, "scaler", getattr(accelerator, "scaler", None)))
        accelerator.scaler = None
        yield


def _has_state(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module) and not callable(value)


def _restore(attributes: list[Attribute]) -> None:
    for attribute in attributes:
        attribute.restore()
