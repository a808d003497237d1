"""Takes over a model's training forward without changing what anybody else sees of the model."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


class Dispatcher:
    """Puts a forward on one model that sends training elsewhere; everything else is the model's own forward.

    A deep copy or a pickle of the model is a plain model, and whoever wrapped the forward afterwards (accelerate's
    autocast) is left with a forward that only passes on.

    Args:
        model: keeps its class, modules, parameters and state-dict keys.
        train: called as the model's forward in training mode with gradients on.

    Attributes:
        plain_forward: the model's own, bound.
        previous: what lay over the class's forward before, None for nothing.
    """

    def __init__(self, model: torch.nn.Module, train: Callable[..., Any]) -> None:
        self._model: torch.nn.Module | None = model
        self._train = train
        self.previous = model.__dict__.get("forward")
        self.plain_forward: Callable[..., Any] = model.forward
        self._function = self._make(type(model))
        model.forward = types.MethodType(self._function, model)

    def remove(self) -> None:
        """Give the model its own forward back; without effect the second time."""
        model, self._model = self._model, None
        if model is None or getattr(model.__dict__.get("forward"), "__func__", None) is not self._function:
            return
        if self.previous is None:
            del model.forward
        else:
            model.forward = self.previous

    def _make(self, model_class: type[torch.nn.Module]) -> Callable[..., Any]:
        dispatcher = self
        covered = self.previous.__func__ if isinstance(self.previous, types.MethodType) else model_class.forward

        @functools.wraps(covered)
        def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not dispatcher._model:
                return types.MethodType(covered, model)(*args, **kwargs)
            if model.training and torch.is_grad_enabled():
                return dispatcher._train(*args, **kwargs)
            return dispatcher.plain_forward(*args, **kwargs)

        return forward
