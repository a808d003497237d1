"""Takes over a model's training forward without changing what anybody else sees of the model."""

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from optimum_memopt.engines import base
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.checkpointing import Checkpointing
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import get_logger

TrainForward = Callable[..., Any]


def check_parameters(model: torch.nn.Module) -> None:
    """Refuse a model in which there is nothing to train.

    Raises:
        UnsupportedModelError: it has no parameters.
    """
    if next(model.parameters(), None) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no parameters, so there is nothing to train")


class TrainingForward:
    """Puts a forward on one model that sends training elsewhere; everything else is the model's own forward.

    A deep copy or a pickle of the model is a plain model. Whoever wraps the forward after `start` (accelerate's
    autocast) is left after `stop` with a forward that only passes on, and finds it working again after the next
    `start`. Take it from `training_forward`.

    Args:
        model: keeps its class, modules, parameters and state-dict keys.

    Attributes:
        train: called as the model's forward in training mode with gradients on; None: nothing is taken over.
        plain_forward: the model's own, bound.
        previous: what lay over the class's forward before, None for nothing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.train: TrainForward | None = None
        self.previous = model.__dict__.get("forward")
        self.plain_forward: Callable[..., Any] = model.forward
        self._function = self._make(type(model))
        # What lay on the model at `stop`, where this was not taken off because something lay over it.
        self._covered_by: Any = None

    def start(self, train: TrainForward) -> None:
        """Send training forwards to `train` until `stop`."""
        self.train = train
        if self._covered_by is None:
            self._model.forward = types.MethodType(self._function, self._model)
        self._covered_by = None

    def stop(self) -> None:
        """Give the model its own forward back; without effect the second time."""
        if self.train is None:
            return
        self.train = None
        lying = self._model.__dict__.get("forward")
        if getattr(lying, "__func__", None) is not self._function:
            self._covered_by = lying
        elif self.previous is None:
            del self._model.forward
        else:
            self._model.forward = self.previous

    @property
    def is_in_place(self) -> bool:
        """Whether `start` would lie over the same forward as the last time."""
        lying = self._model.__dict__.get("forward")
        return self.train is not None or lying is (self.previous if self._covered_by is None else self._covered_by)

    def _make(self, model_class: type[torch.nn.Module]) -> Callable[..., Any]:
        training_forward = self
        covered = self.previous.__func__ if isinstance(self.previous, types.MethodType) else model_class.forward

        @functools.wraps(covered)
        def forward(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if model is not training_forward._model:
                return types.MethodType(covered, model)(*args, **kwargs)
            if training_forward.train is not None and model.training and torch.is_grad_enabled():
                return training_forward.train(*args, **kwargs)
            return training_forward.plain_forward(*args, **kwargs)

        return forward


# Weak both ways: a training_forward that something lies over is kept by the model, any other one by its engine.
_training_forwards: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[TrainingForward]]" = (
    weakref.WeakKeyDictionary()
)


def training_forward(model: torch.nn.Module) -> TrainingForward:
    """The model's training_forward, the last one if it fits still.

    accelerate wraps the forward of a model once and for all (1.15, `prepare_model`): the next engine has to come into
    the place of the last one, under autocast.
    """
    held = _training_forwards.get(model)
    known = held() if held is not None else None
    if known is None or not known.is_in_place:
        known = TrainingForward(model)
        _training_forwards[model] = weakref.ref(known)
    return known


class InPlaceEngine:
    """The life cycle of an engine: `attach`, `suspend`, `detach`.

    What was compiled for a model is kept while the engine is suspended, and used again when it is attached to the
    same model. Meanwhile the model's own activation checkpointing is off; level 1 takes its place where no plan was
    asked for.
    """

    name: str
    reason = "asked for"
    keeps_checkpointing = False

    def __init__(self, selection: Selection | None = None) -> None:
        self._model: torch.nn.Module | None = None
        self._training_forward: TrainingForward | None = None
        self._is_attached = False
        self.backward_from_loss_only: Callable[[], bool] = lambda: False
        self.apply(selection or Selection())

    @property
    def selection(self) -> Selection:
        """The plans that were asked for."""
        return self._asked

    def apply(self, selection: Selection) -> None:
        """Choose other plans; takes effect with the next training forward."""
        self._asked = selection
        self._selection = selection
        self._forget()

    def attach(self, model: torch.nn.Module) -> None:
        """Take over `model`'s training forward, until `suspend` or `detach`.

        Raises:
            UnsupportedModelError: the engine cannot train this model.
            MemOptError: the model has an engine already, or this engine is attached to another model.
        """
        if self._is_attached:
            if self._model is not model:
                raise MemOptError("this engine holds another model; detach() it first")
            self._continue()
            return
        self._check(model)
        base.register(model, self)
        place = training_forward(model)
        if self._model is not model or self._training_forward is not place:
            self._forget()
        self._model, self._training_forward, self._is_attached = model, place, True
        place.start(self._forward)
        self._checkpointing = Checkpointing(model)
        try:
            self._enter()
            if self._checkpointing.is_on and not self.keeps_checkpointing:
                self._replace_checkpointing()
            elif self._selection != self._asked:
                self.apply(self._asked)
        except BaseException:
            self.suspend()
            raise
        self._continue()

    def suspend(self) -> None:
        """Give the model back as it was and keep what was compiled for it; without effect when nothing is attached."""
        if not self._is_attached:
            return
        self._is_attached = False
        base.unregister(self._model)
        self._training_forward.stop()
        self._checkpointing.give_back()
        self._leave()

    def detach(self) -> None:
        """`suspend`, and forget the model with all that was compiled for it."""
        self.suspend()
        self._forget()
        self._model = self._training_forward = None

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._checkpointing.is_on and not self.keeps_checkpointing:
            # Switched on since, or by an activation_checkpointing_enable() of the user's training loop.
            self._replace_checkpointing()
        return self._train_forward(*args, **kwargs)

    def _replace_checkpointing(self) -> None:
        self._checkpointing.switch_off()
        by = f"config {self._selection.config}" if self._selection.config else f"level {self._selection.level or 1}"
        get_logger().info(
            f"activation checkpointing of {type(self._model).__name__} is off while the {self.name} engine trains it; "
            f"{by} recomputes instead"
        )
        if self._selection.config is None and not self._selection.level:
            self._selection = replace(self._selection, level=1)
            self._forget()

    def smooth_labels(self, smoothing: Any) -> bool:
        """See `Engine.smooth_labels`."""
        return False

    def _check(self, model: torch.nn.Module) -> None:
        """Refuse what the engine cannot train. Raises MemOptError."""

    def _enter(self) -> None:
        """Change what has to be different while the model is attached."""

    def _leave(self) -> None:
        """Undo `_enter`."""

    def _continue(self) -> None:
        """Training begins, or begins anew half-way through a step."""

    def _forget(self) -> None:
        """Drop all that was compiled."""

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
