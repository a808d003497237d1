"""Which engine a model has."""

import weakref

import torch

from optimum_memopt.engines.base import Engine
from optimum_memopt.errors import MemOptError

# Weak both ways, since an engine refers to its model; what it puts on the model keeps it alive, this keeps neither.
_engines: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Engine]]" = weakref.WeakKeyDictionary()


def engine_of(model: torch.nn.Module) -> Engine | None:
    """The engine that is attached to this model, if any."""
    held = _engines.get(model)
    return held() if held is not None else None


def note_engine(model: torch.nn.Module, engine: Engine, instead_of: Engine | None = None) -> None:
    """Note that `engine` is attached to `model`.

    Args:
        model: the module whose forward the engine takes over.
        engine: the engine that trains it.
        instead_of: an engine that does its work through `engine` from now on.

    Raises:
        MemOptError: another engine is attached already.
    """
    holder = engine_of(model)
    if holder is not None and holder not in (engine, instead_of):
        raise MemOptError(
            f"{type(model).__name__} already has the {holder.name} engine attached; detach it first: detach() of what "
            "optimize() returned, or trainer.memopt.detach() of the Trainer that is training it"
        )
    _engines[model] = weakref.ref(engine)


def forget_engine(model: torch.nn.Module) -> None:
    """Note that no engine is attached to `model`."""
    _engines.pop(model, None)
