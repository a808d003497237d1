"""`auto`: the engine of choice, and the next one as soon as that one turns out unable to train the model."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from optimum_memopt.compat import world_size
from optimum_memopt.engines.api.engine import Engine, Smoothing
from optimum_memopt.engines.api.run import Resolved, Selection
from optimum_memopt.engines.shared.forward_patch import ForwardState, TrainForward, training_forward
from optimum_memopt.engines.shared.in_place import note_engine
from optimum_memopt.engines.shared.registry import factory
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import get_logger

if TYPE_CHECKING:
    from transformers import TrainingArguments


def create(resolved: Resolved[Any]) -> Engine:
    """The engine that was decided on, not yet attached; with one that takes over if there is one. Logs nothing."""
    engine = _create(resolved)
    if (following := resolved.then) is None:
        return engine

    def create_second(selection: Selection) -> Engine:
        second = _create(following)
        # As the first one read it, which may know more places than the options.
        second.apply(selection)
        return second

    # The rest of the protocol is forwarded.
    return cast(Engine, AutoEngine(engine, create_second, resolved.given))


def _create(resolved: Resolved[Any]) -> Engine:
    engine = factory(resolved.engine).create(resolved.options, resolved.selection)
    engine.reason = resolved.reason
    return engine


class AutoEngine:
    """Trains with one engine, and with another one as soon as the first turns out unable to.

    That may be in a training forward, in most cases the first. The second engine then runs the same inputs, with
    random generators and buffers restored, so that the run is the second engine's from the beginning. All that is not
    here is forwarded to the engine that trains the model.

    Args:
        create_second: makes the other one with these plans.
        unused: flags that the other one does not read, for the line that says so.
    """

    def __init__(self, first: Engine, create_second: Callable[[Selection], Engine], unused: Sequence[str]) -> None:
        self._current = first
        self._create_second: Callable[[Selection], Engine] | None = create_second
        self._unused = f" ({', '.join(unused)} not used)" if unused else ""
        self._model: torch.nn.Module | None = None
        self._train_by_first: TrainForward | None = None
        self._smoothing: Smoothing | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._current, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._current, name, value)

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Decide by Trainer arguments. Raises MemOptError where neither engine can train with them."""
        try:
            self._current.check_arguments(args)
        except MemOptError as error:
            if self._create_second is None:
                raise
            self._go_on_with_second(f"auto: {error}")
            self._current.check_arguments(args)

    def attach(self, model: torch.nn.Module) -> None:
        """Take over the model's training forward. Raises MemOptError for what neither engine can train."""
        try:
            self._attach(model)
        except UnsupportedModelError as error:
            if self._create_second is None:
                raise
            self._attach_second(model, error.why)
        self._model = model
        patch = training_forward(model)
        if self._create_second is not None and patch.train != self._train_forward:
            self._train_by_first = patch.train
            patch.train = self._train_forward

    def detach(self) -> None:
        self._current.detach()
        self._model = self._train_by_first = None

    def smooth_labels(self, smoothing: Smoothing | None) -> bool:
        self._smoothing = smoothing
        return self._current.smooth_labels(smoothing)

    def _train_forward(self, *args: Any, **kwargs: Any) -> Any:
        model, train_by_first = self._model, self._train_by_first
        assert model is not None and train_by_first is not None
        has_trained = self._current.plans() is not None
        before = ForwardState.of(model, with_buffers=not has_trained)
        try:
            return train_by_first(*args, **kwargs)
        except UnsupportedModelError as error:
            if has_trained and world_size() > 1:
                # The ranks have been compared, and this one cannot know whether the others go on with the first.
                raise
            why = error.why
        self._attach_second(model, why)
        before.restore(model)
        train = training_forward(model).train
        assert train is not None
        if self._smoothing is not None and not self._current.smooth_labels(self._smoothing):
            train = self._smoothing.wrap(train)
        return train(*args, **kwargs)

    def _attach(self, model: torch.nn.Module) -> None:
        self._current.attach(model)
        note_engine(model, cast(Engine, self), instead_of=self._current)

    def _attach_second(self, model: torch.nn.Module, why: str) -> None:
        self._go_on_with_second(why)
        get_logger().info(f"{self._current.reason}; training with the {self._current.name} engine")
        self._attach(model)

    def _go_on_with_second(self, why: str) -> None:
        first, create = self._current, self._create_second
        assert create is not None
        second = create(first.selection)
        second.run, second.outputs_read_by = first.run, first.outputs_read_by
        second.reason = f"{why}{self._unused}"
        # Only now, since the second one may refuse the plan.
        first.detach()
        self._current, self._create_second, self._train_by_first = second, None, None
