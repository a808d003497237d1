"""Keeps transformers models from returning key-value caches in training, where nobody reads them."""

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_NAME = "use_cache"
# Of a forward: the position of `use_cache` (-1: no such parameter), and whether it takes any keyword.
_signatures: "weakref.WeakKeyDictionary[Callable[..., Any], tuple[int, bool]]" = weakref.WeakKeyDictionary()


def without_key_value_cache(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], forced: bool = False
) -> dict[str, Any]:
    """`kwargs` with `use_cache=False` where the model's forward takes it.

    A caller would hold the caches, so that no plan could free them. The config is not enough: Trainer sets
    `use_cache` of the outer one only, while T5's decoder reads a copy of its own.

    Args:
        model: whose forward is called.
        args: what the forward gets by position.
        kwargs: what the forward gets by name.
        forced: also where `use_cache` was given by name, for an engine that cannot return caches.
    """
    if _NAME in kwargs and not forced:
        return dict(kwargs)
    position = _position(model)
    if position is None or 0 <= position < len(args):
        return dict(kwargs)
    return {**kwargs, _NAME: False}


def _position(model: torch.nn.Module) -> int | None:
    """Where `model.forward` takes `use_cache`, -1: as a keyword only; None: it does not, as far as known."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        # Passes keywords on.
        return None if _position(model.get_base_model()) is None else -1
    if not hasattr(getattr(model, "config", None), _NAME):
        return None
    position, takes_any = _signature(model.forward)
    if position >= 0:
        return position
    if not takes_any:
        return None
    from transformers import PreTrainedModel

    # Models with a head pass keywords on to the model below it; what others do with them is not known.
    inner = model.base_model if isinstance(model, PreTrainedModel) else model
    return None if inner is model or _position(inner) is None else -1


def _signature(forward: Callable[..., Any]) -> tuple[int, bool]:
    function = getattr(forward, "__func__", forward)
    if function not in _signatures:
        parameters = inspect.signature(forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        _signatures[function] = (list(parameters).index(_NAME) if _NAME in parameters else -1, takes_any)
    return _signatures[function]
