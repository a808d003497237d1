"""Activation checkpointing of transformers' models, switched off while an engine recomputes in its place.

transformers keeps it as a flag of each module that can do it (5.23, `PreTrainedModel._set_gradient_checkpointing`),
whoever asked for it: `--gradient_checkpointing` at the beginning of `Trainer.train`, or the user. Beside it hooks let
the embeddings' outputs require gradients, which re-entrant checkpointing of a frozen model needs and which split
torch's graph at the embeddings; transformers puts them on again each time, and knows the handles of the last only.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimum_memopt.compat import forward_hooks

_SWITCH = "gradient_checkpointing"
# transformers' `enable_input_require_grads`; PEFT's `_prepare_model_for_gradient_checkpointing` (0.21).
_INPUT_GRADIENT_HOOKS = frozenset({"make_inputs_require_grads", "make_inputs_require_grad"})


class Checkpointing:
    """The flags and hooks of one model.

    Args:
        model: as it is attached.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # Known once, so that a look at each training forward costs next to nothing.
        self._able = [module for module in model.modules() if _can_checkpoint(module)]
        self._switched_off: list[torch.nn.Module] = []
        self._hooks: list[tuple[dict[int, Any], int, Callable[..., Any]]] = []

    @property
    def is_on(self) -> bool:
        """Whether any module would checkpoint its next training forward."""
        return any(module.gradient_checkpointing for module in self._able)

    def switch_off(self) -> None:
        """Until `restore`."""
        for module in self._able:
            if module.gradient_checkpointing:
                setattr(module, _SWITCH, False)
                self._switched_off.append(module)
        for module in self._model.modules():
            hooks = forward_hooks(module)
            for key, hook in tuple(hooks.items()):
                if getattr(hook, "__name__", "") in _INPUT_GRADIENT_HOOKS:
                    # A handle's remove() finds the hook by its key, also after `restore`.
                    self._hooks.append((hooks, key, hooks.pop(key)))

    def restore(self) -> None:
        """Undo `switch_off`."""
        for module in self._switched_off:
            setattr(module, _SWITCH, True)
        for hooks, key, hook in self._hooks:
            hooks[key] = hook
        self._switched_off, self._hooks = [], []


def _can_checkpoint(module: torch.nn.Module) -> bool:
    # Not hasattr, which looks through PEFT's wrappers.
    return _SWITCH in vars(module) or hasattr(type(module), _SWITCH)


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
