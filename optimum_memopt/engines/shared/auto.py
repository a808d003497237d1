"""`auto`: the engine of choice, and the next one as soon as that one turns out unable to train the model."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.engines.api.engine import Engine, Run, Smoothing
from optimum_memopt.engines.api.predictions import Frontier, StepTimeline
from optimum_memopt.engines.api.run import Resolved, Selection
from optimum_memopt.engines.shared.forward_patch import ForwardState, TrainForward, training_forward
from optimum_memopt.engines.shared.in_place import note_engine
from optimum_memopt.engines.shared.registry import factory
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.logs import get_logger
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable

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

    return AutoEngine(engine, create_second, resolved.given)


def _create(resolved: Resolved[Any]) -> Engine:
    engine = factory(resolved.engine).create(resolved.options, resolved.selection)
    engine.reason = resolved.reason
    return engine


class AutoEngine:
    """Trains with one engine, and with another one as soon as the first turns out unable to.

    That may be in a training forward, in most cases the first. The second engine then runs the same inputs, with
    random generators and buffers restored, so that the run is the second engine's from the beginning.

    Args:
        first: the engine to try.
        create_second: makes the other one with these plans.
        unused: flags that the other one does not read, for the line that says so.
    """

    def __init__(
        self, first: Engine, create_second: Callable[[Selection], Engine], unused: Sequence[str] = ()
    ) -> None:
        self._current = first
        self._create_second: Callable[[Selection], Engine] | None = create_second
        self._unused = f" ({', '.join(unused)} not used)" if unused else ""
        self._model: torch.nn.Module | None = None
        self._train_by_first: TrainForward | None = None
        self._smoothing: Smoothing | None = None

    @property
    def name(self) -> str:
        """The name of the engine that trains the model."""
        return self._current.name

    @property
    def reason(self) -> str:
        return self._current.reason

    @reason.setter
    def reason(self, why: str) -> None:
        self._current.reason = why

    @property
    def selection(self) -> Selection:
        return self._current.selection

    @property
    def outputs_read_by(self) -> Callable[[], str] | None:
        return self._current.outputs_read_by

    @outputs_read_by.setter
    def outputs_read_by(self, asked: Callable[[], str] | None) -> None:
        self._current.outputs_read_by = asked

    @property
    def run(self) -> Callable[[], Run] | None:
        return self._current.run

    @run.setter
    def run(self, asked: Callable[[], Run] | None) -> None:
        self._current.run = asked

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
            self._current.attach(model)
        except UnsupportedModelError as error:
            if self._create_second is None:
                raise
            self._go_on_with_second(error.why)
            get_logger().info(self._line)
            self._current.attach(model)
        note_engine(model, self, instead_of=self._current)
        self._model = model
        patch = training_forward(model)
        if self._create_second is not None and patch.train != self._train_forward:
            self._train_by_first = patch.train
            patch.train = self._train_forward

    def suspend(self) -> None:
        self._current.suspend()

    def detach(self) -> None:
        self._current.detach()
        self._model = self._train_by_first = None

    def plans(self) -> PlanTable | None:
        return self._current.plans()

    def plan_file(self) -> PlanFile | None:
        return self._current.plan_file()

    def check_used(self) -> None:
        self._current.check_used()

    def without_plan(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        return self._current.without_plan(error)

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        return self._current.predicted_peak_mib(optimizer, gradient_accumulation)

    def timeline(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> StepTimeline | None:
        return self._current.timeline(optimizer, gradient_accumulation)

    def frontier(self) -> Frontier | None:
        return self._current.frontier()

    def insight(self) -> str:
        return self._current.insight()

    def apply(self, selection: Selection) -> None:
        self._current.apply(selection)

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
            if has_trained and _world_size() > 1:
                # The ranks have been compared, and this one cannot know whether the others go on with the first.
                raise
            why, smoothing = error.why, self._smoothing
        self._go_on_with_second(why)
        get_logger().info(self._line)
        self._current.attach(model)
        note_engine(model, self, instead_of=self._current)
        before.restore(model)
        train = training_forward(model).train
        assert train is not None
        if smoothing is not None and not self._current.smooth_labels(smoothing):
            train = smoothing.wrap(train)
        return train(*args, **kwargs)

    def _go_on_with_second(self, why: str) -> None:
        first, create = self._current, self._create_second
        assert create is not None
        second = create(first.selection)
        second.run = first.run
        second.outputs_read_by, second.reason = first.outputs_read_by, f"{why}{self._unused}"
        # Only now, since the second one may refuse the plan.
        first.detach()
        self._current, self._create_second, self._train_by_first = second, None, None

    @property
    def _line(self) -> str:
        return f"{self.reason}; training with the {self.name} engine"


def _world_size() -> int:
    is_used = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_used else 1
