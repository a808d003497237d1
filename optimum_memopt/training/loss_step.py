"""A Trainer's loss, if it is computed outside of the model's forward: its arguments are recorded while a step runs, so
that it can be computed again on tensors without data, to find the memory that it takes beside the forward."""

import contextlib
import copy
import functools
import inspect
import itertools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.engines.api.run import LossStep
from optimum_memopt.engines.shared.forward_patch import Attribute, weak_method
from optimum_memopt.trainer_patches import innermost, loss_name
from optimum_memopt.training import compat_dry_run
from optimum_memopt.training.fake_run import MOST_ITEMS, held_by, holders_of, is_sharded, left_as_it_is


class NotedLoss:
    """Records the arguments of a Trainer's `compute_loss` while it runs. Refers weakly to the Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)
        # Arguments of the running call: a copy of the inputs, further positional and keyword arguments.
        self._given: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self._compute: Callable[..., Any] | None = None
        self._forwards = _Forwards()

    def wrap(self, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compute_loss`, wrapped to record its arguments in training."""
        self._compute = weak_method(compute_loss)

        def compute(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return compute_loss(model, inputs, *args, **kwargs)
            # Copied, since `compute_loss` may remove entries, also of a tokenizer's `BatchEncoding`, which is no dict.
            self._given = copy.copy(inputs) if isinstance(inputs, Mapping) else inputs, args, kwargs
            if (trainer := self._trainer()) is not None and loss_name(trainer):
                self._forwards.note(model)
            try:
                return compute_loss(model, inputs, *args, **kwargs)
            finally:
                self._given = None
                self._forwards.forget()

        return compute

    def __call__(self) -> LossStep | None:
        """Returns the loss of the running step; None if the model's forward computes it, or no step runs."""
        trainer, compute = self._trainer(), self._compute
        if trainer is None or compute is None or self._given is None or not (name := loss_name(trainer)):
            return None
        inputs, args, kwargs = self._given
        if unknown := _unknown(trainer):
            return LossStep(name, unknown)
        held = self._trainer
        computed, prepared = partial(_computed, held, compute), partial(_prepared, held, self._forwards)
        return LossStep(name, "", inputs, (args, kwargs), computed, partial(_modules, held), prepared)


class _Forwards:
    """The instance forwards of a model's modules at the start of a step.

    During its call, a loss may replace forwards with functions that cache outputs (sentence-transformers'
    `MatryoshkaLoss`). These functions must not be called while the loss is simulated within that call.
    """

    def __init__(self) -> None:
        # Listed once per model: a walk over the modules takes milliseconds.
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._noted: dict[torch.nn.Module, Any] | None = None

    def note(self, model: torch.nn.Module) -> None:
        if not self._modules or self._modules[0]() is not model:
            self._modules = list(map(weakref.ref, model.modules()))
        self._noted = dict(self._own())

    def forget(self) -> None:
        self._noted = None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Returns a context in which modules have the forwards they had at the start of the step; no effect outside of
        a step."""
        now = dict(self._own())
        self._put(now if self._noted is None else self._noted)
        try:
            yield
        finally:
            self._put(now)

    def _own(self) -> Iterator[tuple[torch.nn.Module, Any]]:
        for held in self._modules:
            if (module := held()) is not None and (forward := vars(module).get("forward")) is not None:
                yield module, forward

    def _put(self, forwards: Mapping[torch.nn.Module, Any]) -> None:
        for module, forward in {**dict(self._own()), **forwards}.items():
            if module not in forwards:
                del module.forward
            elif vars(module).get("forward") is not forward:
                module.forward = forward


# Packages that keep the state of a step in attributes of their objects only, not in globals or closures.
_LIBRARIES = frozenset({"accelerate", "numpy", "optimum_memopt", "peft", "torch", "transformers", "trl"})


def _named(trainer: Any) -> list[Any]:
    """Returns the values that a Trainer's user code uses beside instance attributes: globals, closure variables and
    class attributes, except functions, modules and classes."""
    of_classes = (value for kind in type(trainer).__mro__ for value in vars(kind).values())
    todo = [innermost(trainer, "compute_loss"), trainer.compute_loss_func, *of_classes]
    found: dict[int, Any] = {}
    while todo:
        value = todo.pop()
        if isinstance(value, functools.partial):
            todo += [value.func, *value.args, *value.keywords.values()]
            continue
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else value
        is_function = isinstance(function, types.FunctionType)
        if id(function) in found or (is_function and (function.__module__ or "").partition(".")[0] in _LIBRARIES):
            continue
        found[id(function)] = function
        if is_function:
            # A variable may have no value yet.
            with contextlib.suppress(ValueError):
                variables = inspect.getclosurevars(function)
                todo += [*variables.nonlocals.values(), *variables.globals.values()]
    left_out = types.FunctionType | types.ModuleType | type
    return [value for value in found.values() if value is not trainer and not isinstance(value, left_out)]


def _unknown(trainer: Any) -> str:
    """Returns why a Trainer's loss must not be computed again; empty if it may."""
    if is_sharded(trainer):
        return "the model is sharded"
    if trainer.args.n_gpu > 1:
        return "several GPUs in one process"
    # Computing the loss again would consume further items of an iterator.
    iterators = (name for name, value in vars(trainer).items() if isinstance(value, Iterator))
    others = (type(value).__name__ for value in _named(trainer) if isinstance(value, Iterator))
    return next((f"it may consume an iterator, {name}" for name in itertools.chain(iterators, others)), "")


def _computed(
    held: Callable[[], Any], compute_loss: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Returns the loss of a batch of tensors without data."""
    trainer = held()
    with trainer.compute_loss_context_manager():
        loss = compute_loss(trainer.model, inputs, *args, **kwargs)
    return loss[0] if isinstance(loss, tuple) else loss


def _modules(held: Callable[[], Any]) -> list[torch.nn.Module]:
    trainer = held()
    return [value for value in (*holders_of(trainer), *_named(trainer)) if isinstance(value, torch.nn.Module)]


@contextlib.contextmanager
def _prepared(held: Callable[[], Any], forwards: _Forwards) -> Iterator[None]:
    """Returns a context in which a Trainer can compute a loss; restores all state on exit, and gathers nothing from
    other ranks."""
    trainer, accelerator = held(), held().accelerator
    parts = {id(part): part for module in _modules(held) for part in module.modules()}.values()
    attributes = [
        each for part in parts for each in Attribute.all_of(part) if not isinstance(each.value, torch.Tensor)
    ]
    named = _named(trainer)
    values = (*held_by(trainer), *trainer.callback_handler.callbacks, *named)
    data = trainer.train_dataset, trainer.eval_dataset
    owners = [value for value in values if _has_state(value) and not any(value is each for each in data)]
    owners += [each for each in named if isinstance(each, list | dict | deque) and len(each) <= MOST_ITEMS]
    with contextlib.ExitStack() as stack:
        stack.enter_context(left_as_it_is(trainer, owners))
        for attribute in attributes:
            stack.callback(attribute.restore)
        stack.enter_context(forwards.in_place())
        stack.enter_context(compat_dry_run.alone())
        stack.enter_context(compat_dry_run.longest_generation(contextlib.nullcontext))
        # Run without the gradient scaler: a scale created in the simulation would be a tensor without data.
        stack.callback(functools.partial(setattr, accelerator, "scaler", getattr(accelerator, "scaler", None)))
        accelerator.scaler = None
        yield


# Types whose attributes are not state to restore.
_STATELESS = types.FunctionType | types.MethodType | types.ModuleType | type | torch.nn.Module


def _has_state(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _STATELESS)
