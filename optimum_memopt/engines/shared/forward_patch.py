"""Methods handed to what outlives their object, such as a backend that torch keeps until the process ends."""

import functools
import random
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, called while its object is alive."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = held()
        assert alive is not None
        return alive(*args)

    return call


@dataclass(frozen=True)
class ForwardState:
    """The state that a failing forward may have changed: random generators, and the buffers of modules."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None
    buffers: tuple[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor], ...]

    @classmethod
    def of(cls, model: torch.nn.Module, with_buffers: bool, others: Sequence[torch.nn.Module] = ()) -> "ForwardState":
        """Before a forward.

        Args:
            model: whose forward it is.
            with_buffers: which costs a copy of each.
            others: modules that take part, as one that computes the loss; of theirs, too.
        """
        parameter = next(model.parameters(), None)
        return cls(
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state(parameter.device) if parameter is not None and parameter.is_cuda else None,
            tuple(
                (module, name, buffer, buffer.detach().clone())
                for module in (torch.nn.ModuleList([model, *others]).modules() if with_buffers else ())
                for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            ),
        )

    def restore(self, model: torch.nn.Module) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, next(model.parameters()).device)
        with torch.no_grad():
            for module, name, buffer, values in self.buffers:
                setattr(module, name, buffer.copy_(values))


TrainForward = Callable[..., Any]


class TrainingForward:
    """Patches the forward of one model: training calls go elsewhere, all others to the model's own forward.

    A deep copy or a pickle of the model is a plain model. Where something has wrapped the patched forward after
    `start` (accelerate's autocast), `stop` leaves the patch in place, with nothing to do until the next `start`. Get
    it from `training_forward`.

    Args:
        model: keeps its class, modules, parameters and state-dict keys.

    Attributes:
        train: called as the model's forward in training mode with gradients on; None: the model's own is.
        plain_forward: the model's own, bound.
        previous: a forward of the instance, over that of its class, from before; None: there was none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.train: TrainForward | None = None
        self.previous = model.__dict__.get("forward")
        self.plain_forward: Callable[..., Any] = model.forward
        self._function = self._patch(type(model))
        # The forward that had wrapped this one at `stop`, so that it could not be removed.
        self._wrapped_by: Any = None

    def start(self, train: TrainForward) -> None:
        """Send training forwards to `train` until `stop`."""
        self.train = train
        if self._wrapped_by is None:
            self._model.forward = types.MethodType(self._function, self._model)
        self._wrapped_by = None

    def stop(self) -> None:
        """Restore the model's own forward; without effect the second time."""
        if self.train is None:
            return
        self.train = None
        current = self._model.__dict__.get("forward")
        if getattr(current, "__func__", None) is not self._function:
            self._wrapped_by = current
        elif self.previous is None:
            del self._model.forward
        else:
            self._model.forward = self.previous

    @property
    def is_in_place(self) -> bool:
        """Whether `start` would patch the same forward as the last time."""
        current = self._model.__dict__.get("forward")
        return self.train is not None or current is (self.previous if self._wrapped_by is None else self._wrapped_by)

    def _patch(self, model_class: type[torch.nn.Module]) -> Callable[..., Any]:
        training_forward = self
        patched = self.previous.__func__ if isinstance(self.previous, types.MethodType) else model_class.forward

        @functools.wraps(patched)
        def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not training_forward._model:
                return types.MethodType(patched, model)(*args, **kwargs)
            if training_forward.train is not None and model.training and torch.is_grad_enabled():
                return training_forward.train(*args, **kwargs)
            return training_forward.plain_forward(*args, **kwargs)

        return forward


# Weak both ways: one that something has wrapped is kept by the model, any other one by its engine.
_training_forwards: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[TrainingForward]]" = (
    weakref.WeakKeyDictionary()
)


def training_forward(model: torch.nn.Module) -> TrainingForward:
    """The model's patch: the last one while it is still in its place.

    accelerate wraps the forward of a model once and for all (1.15, `prepare_model`): the next engine has to take the
    place of the last one, under autocast.
    """
    held = _training_forwards.get(model)
    known = held() if held is not None else None
    if known is None or not known.is_in_place:
        known = TrainingForward(model)
        _training_forwards[model] = weakref.ref(known)
    return known
