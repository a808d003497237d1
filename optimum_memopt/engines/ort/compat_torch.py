"""Private names of torch's modules and tensors that have no public counterpart without a cost at each step."""

from collections.abc import Mapping

import torch

# Attributes that every module has, except `training`: torch's own bookkeeping.
MODULE_FIELDS = frozenset(vars(torch.nn.Module())) - {"training"}
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
