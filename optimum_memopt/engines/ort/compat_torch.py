"""Private names of torch's modules and tensors that have no public counterpart without a cost at each step."""

from collections.abc import Mapping
from typing import Any

import torch

# Attributes that every module has, except `training`: torch's own bookkeeping.
MODULE_FIELDS = frozenset(vars(torch.nn.Module())) - {"training"}
# Of a module: its hooks, and how they are called.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
DROPOUTS = torch.nn.modules.dropout._DropoutNd


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def children(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    return module._modules


def parameters(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    return module._parameters


def buffers(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return module._buffers


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    return module._non_persistent_buffers_set


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether anything is called around this module's forward or backward."""
    return any(getattr(module, name, None) for name in MODULE_HOOKS)


def checkpoint_function(module: torch.nn.Module) -> Any:
    """What a module of transformers checkpoints its layers with (5.23): a partial of torch's function; else None."""
    return getattr(module, "_gradient_checkpointing_func", None)
