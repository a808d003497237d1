"""Activation checkpointing of transformers' models, switched off while an engine recomputes in its place.

transformers keeps it as a flag of each module that can do it (5.23, `PreTrainedModel._set_gradient_checkpointing`),
whoever asked for it: `--gradient_checkpointing` at the beginning of `Trainer.train`, or the user. Beside it hooks let
the embeddings' outputs require gradients, which re-entrant checkpointing of a frozen model needs and which split
torch's graph at the embeddings; transformers puts them on again each time, and knows the handles of the last only.
"""

from collections.abc import Callable
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
