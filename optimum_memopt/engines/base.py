"""What an engine is, and which one a model has. A new engine is a new package and a line in `ENGINES`."""

import importlib
import importlib.metadata
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.grammar import PlanConfig
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Name of the flag's value to the module that offers `create(options) -> Engine` and `missing() -> str` (empty: usable
# here) and `declines(options) -> str` (empty: does what they ask for), in the order in which `auto` tries them.
ENGINES = {"ort": "optimum_memopt.engines.ort", "compile": "optimum_memopt.engines.compile"}


@dataclass(frozen=True)
class Selection:
    """What the user asked for: a config, or a level from 1 on.

    `strict`: ids that do not exist are errors instead of remarks.
    """

    config: PlanConfig | None = None
    level: int = 0
    strict: bool = True


class Engine(Protocol):
    """Trains a model, in place, under a memory plan.

    Attributes:
        name: a key of `ENGINES`.
        reason: why this engine and no other.
        backward_from_loss_only: asked at each training forward: whether its caller goes back from the loss alone.
    """

    name: str
    reason: str
    backward_from_loss_only: Callable[[], bool]

    @property
    def selection(self) -> Selection:
        """The plans that were asked for."""

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Refuse Trainer arguments that this engine cannot train with. Raises MemOptError."""

    def attach(self, model: torch.nn.Module) -> None:
        """Take over the model's training forward. Raises MemOptError for what the engine cannot train."""

    def suspend(self) -> None:
        """Give the model back as it was. What was compiled for it is kept for the next `attach`, as are the plans."""

    def detach(self) -> None:
        """Give the model back as it was and forget it; without effect when nothing is attached."""

    def smooth_labels(self, smoothing: Any) -> bool:
        """Return the smoothed loss from training forwards with labels, from now on; False: this engine does not."""

    def plans(self) -> PlanTable | None:
        """The table of the current training graph, None before the first training forward."""

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        """What the largest step of the run so far should have held, MiB; None where the engine does not predict.

        Args:
            gradient_accumulation: whether gradients of several micro-batches add up.
        """

    def insight(self) -> str:
        """The engine's own per-node text for `--memory_opt_log_level devinfo`, empty when there is none."""

    def apply(self, selection: Selection) -> None:
        """Choose other plans; takes effect with the next training forward."""


# Weak both ways, since an engine refers to its model; what it puts on the model keeps it alive, this keeps neither.
_engines: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()


def engine_of(model: torch.nn.Module) -> Engine | None:
    """The engine that is attached to this model, if any."""
    held = _engines.get(model)
    return held() if held is not None else None


def register(model: torch.nn.Module, engine: Engine, instead_of: Engine | None = None) -> None:
    """Note that `engine` holds `model`.

    Args:
        instead_of: an engine that does its work through `engine` from now on.

    Raises:
        MemOptError: another engine does already.
    """
    holder = engine_of(model)
    if holder is not None and holder not in (engine, instead_of):
        raise MemOptError(
            f"{type(model).__name__} already has the {holder.name} engine attached; give it back first: detach() of "
            "what optimize() returned, or trainer.memopt.detach() of the Trainer that is training it"
        )
    _engines[model] = weakref.ref(engine)


def unregister(model: torch.nn.Module) -> None:
    _engines.pop(model, None)


def resolve(name: str) -> tuple[str, str]:
    """The engine for a flag value, and why.

    Args:
        name: `auto` or a key of `ENGINES`.

    Raises:
        MemOptError: no such engine, or none that works on this machine.
    """
    if name == "auto":
        (first, *_), reason = _usable()
        return first, reason
    if name not in ENGINES:
        raise MemOptError(f"memory_opt_engine {name!r}: allowed are auto, {', '.join(ENGINES)}")
    if missing := _module(name).missing():
        raise MemOptError(f"memory_opt_engine {name}: {missing}")
    return name, "asked for"


def _usable(options: Any = None) -> tuple[list[str], str]:
    """The engines that work here and do what is asked for, in their order, and why the first of them is the first."""
    names, reasons = [], []
    for name in ENGINES:
        module = _module(name)
        if reason := module.missing() or (options is not None and module.declines(options)):
            reasons.append(f"{name}: {reason}")
        else:
            names.append(name)
    if not names:
        raise MemOptError(f"memory_opt_engine auto: no engine works here: {'; '.join(reasons)}")
    return names, "; ".join(["auto: the first engine that works here", *reasons])


def _module(name: str) -> Any:
    return importlib.import_module(ENGINES[name])


def create(options: Any) -> Engine:
    """The engine that `options` name, not yet attached.

    Args:
        options: a `MemOptOptions`, which is checked against `ENGINES` and so stands above this module.

    Raises:
        MemOptError: it cannot work on this machine, or an option is of another engine only.
    """
    if options.memory_opt_engine != "auto":
        (name, reason), others = resolve(options.memory_opt_engine), []
    else:
        (name, *others), reason = _usable(options)
    options.check_engine(name)
    engine: Engine = _module(name).create(options)
    engine.reason = reason
    if not others:
        return engine
    from optimum_memopt.engines.auto import AutoEngine

    def create_second(selection: Selection) -> Engine:
        second: Engine = _module(others[0]).create(options)
        # As the first one read it, which may know more places than the options.
        second.apply(selection)
        return second

    return AutoEngine(engine, create_second, options.given_for_ort())


def installed_version(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Name and version of the first of these distributions that is installed; nothing is imported."""
    for distribution in distributions:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
