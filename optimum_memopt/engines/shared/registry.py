"""Engine registry, and selection of the engine to train with.

A new engine is a folder next to this one whose `__init__` ends with a call of `register_engine`; no other code names
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch

from optimum_memopt.compat.torch import world_size
from optimum_memopt.engines.api.engine import Engine, Smoothing
from optimum_memopt.engines.api.factory import EngineFactory
from optimum_memopt.engines.api.run import AUTO, EngineOptions, Resolved, Selection
from optimum_memopt.engines.shared.forward_patch import ForwardState, TrainForward, training_forward
from optimum_memopt.engines.shared.in_place import note_engine
from optimum_memopt.errors import MemOptError, UnsupportedModelError, excerpt
from optimum_memopt.logs import get_logger

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(frozen=True)
class Registration:
    """An engine: its flags, its name as a value of `--memory_opt_engine`, its priority in `auto`.

    Attributes:
        name: its value of `--memory_opt_engine`.
        options: a dataclass of the engine's own flags, in addition to `EngineOptions`; all have defaults and names
            that no other engine uses.
        load: imports the engine's code and returns its factory; called on first use.
        summary: a few words for the help of `--memory_opt_engine`.
        order: `auto` tries the lowest first; flags of the lowest come last in `--help`.
        for_any_engine: options that also apply when another engine trains.
        need_trainer: options that `optimize` does not use.
        per_rank: options that may differ between ranks.
    """

    name: str
    options: type
    load: Callable[[], EngineFactory[Any]]
    summary: str
    order: int = 100
    for_any_engine: frozenset[str] = frozenset()
    need_trainer: frozenset[str] = frozenset()
    per_rank: frozenset[str] = frozenset()


_registrations: dict[str, Registration] = {}


def register_engine(engine: Registration) -> None:
    """Register an engine. Raises ValueError if the name is taken."""
    if engine.name in _registrations or engine.name == AUTO:
        raise ValueError(f"engine {engine.name} is already registered")
    _registrations[engine.name] = engine


def registrations() -> tuple[Registration, ...]:
    """Returns all registered engines, in the order in which `auto` tries them."""
    return tuple(sorted(_registrations.values(), key=lambda registration: registration.order))


def engine_names() -> tuple[str, ...]:
    """Returns the values of `--memory_opt_engine` except `auto`, in the order in which `auto` tries them."""
    return tuple(registration.name for registration in registrations())


@lru_cache
def factory(name: str) -> EngineFactory[Any]:
    """Returns the factory of a registered engine. Raises MemOptError if there is no such engine."""
    if name not in _registrations:
        raise MemOptError(f"--memory_opt_engine {name!r}: allowed: {', '.join((AUTO, *engine_names()))}")
    return _registrations[name].load()


def predicting_engine() -> str:
    return next(name for name in engine_names() if factory(name).predicts)


def predicting_factory() -> EngineFactory[Any]:
    return factory(predicting_engine())


def choose_engines(name: str, options: EngineOptions | None = None) -> tuple[tuple[str, ...], str]:
    """Returns the engine for a value of `--memory_opt_engine` followed by its fallbacks, and the reason for the first.

    Args:
        options: options that an engine may decline; None: no engine declines.

    Raises:
        MemOptError: there is no such engine, or none works on this machine.
    """
    if name != AUTO:
        if missing := factory(name).missing():
            raise MemOptError(f"--memory_opt_engine {name}: {missing}")
        return (name,), "requested"
    names, reasons = [], []
    for candidate in engine_names():
        engine = factory(candidate)
        if reason := engine.missing() or (options is not None and engine.declines(options)):
            reasons.append(f"{candidate}: {reason}")
        else:
            names.append(candidate)
    if not names:
        raise MemOptError(f"--memory_opt_engine auto: no engine works here: {'; '.join(reasons)}")
    return tuple(names), "; ".join(["auto: the first engine that works here", *reasons])


def given_flags(options: Any, name: str) -> list[str]:
    """Returns the flags that only the engine `name` reads and that are not at their default, as the user gave them."""
    registration = _registrations[name]
    # Defaults of the object's own class: a subclass may change them (the examples' `TrainingArguments`).
    defaults = {field.name: field.default for field in fields(options)}
    shared = registration.for_any_engine.union(field.name for field in fields(EngineOptions))
    own = (field.name for field in fields(registration.options) if field.name not in shared)
    given = {flag: value for flag in own if (value := getattr(options, flag)) != defaults[flag]}
    return [f"--{flag}" if value is True else f"--{flag} {excerpt(value)}" for flag, value in given.items()]


def check_flags_of_others(options: Any, name: str) -> None:
    """Refuse flags that the engine `name` does not read. Raises MemOptError."""
    for other in engine_names():
        if other != name and (given := given_flags(options, other)):
            them = "it" if len(given) == 1 else "them"
            raise MemOptError(
                f"{', '.join(given)} with the {name} engine: only the {other} engine reads {them}; leave {them} out, "
                f"or give --memory_opt_engine {other}"
            )


def create(resolved: Resolved[Any]) -> Engine:
    """Returns the selected engine, not yet attached, with its fallback if it has one. Logs nothing."""
    engine = _create(resolved)
    if (following := resolved.then) is None:
        return engine

    def create_second(selection: Selection) -> Engine:
        second = _create(following)
        # The selection that the first engine read, which may come from more sources than the options.
        second.apply(selection)
        return second

    # AutoEngine forwards the rest of the protocol.
    return cast(Engine, AutoEngine(engine, create_second, resolved.given))


def _create(resolved: Resolved[Any]) -> Engine:
    engine = factory(resolved.engine).create(resolved.options, resolved.selection)
    engine.reason = resolved.reason
    return engine


class AutoEngine:
    """Trains with one engine, and switches to a second engine if the first turns out to be unable to train the model.

    The first engine may fail in a training forward, in most cases the first one. The second engine then runs the same
    inputs, with random generators and buffers restored, so that the run is the second engine's from the beginning.
    All other attributes are forwarded to the engine that trains the model.

    Args:
        create_second: creates the second engine with the given plans.
        unused: flags that the second engine does not read, for the log line about it.
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
        """Choose the engine by Trainer arguments. Raises MemOptError if neither engine can train with them."""
        try:
            self._current.check_arguments(args)
        except MemOptError as error:
            if self._create_second is None:
                raise
            self._go_on_with_second(f"auto: {error}")
            self._current.check_arguments(args)

    def attach(self, model: torch.nn.Module) -> None:
        """Take over the model's training forward. Raises MemOptError if neither engine can train the model."""
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
                # The other ranks continue with the first engine.
                raise
            why = error.why
        self._attach_second(model, why)
        before.restore()
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
        # Detach only now, since the second engine may refuse the plan.
        first.detach()
        self._current, self._create_second, self._train_by_first = second, None, None
