"""FSDP2: the private names of `torch/distributed/fsdp/_fully_shard/` (torch 2.13, there since 2.9)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def sharded_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """The paths of modules whose parameters FSDP2 gathers at once, by group; the model itself is not among them."""
    groups: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        if path and isinstance(module, FSDPModule):
            groups.setdefault(id(module._get_fsdp_state()), []).append(path)
    return tuple(map(tuple, groups.values()))


def is_sharded(module: torch.nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def gather(module: torch.nn.Module) -> None:
    """Gather the parameters of the module's group, as before its forward."""
    if isinstance(module, FSDPModule):
        module.unshard()


def with_cast_inputs(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """A forward's arguments as FSDP2 gives them to it."""
    return module._get_fsdp_state()._cast_forward_inputs(args, kwargs) if is_sharded(module) else (args, kwargs)  # type: ignore[operator]


def with_cast_outputs(module: torch.nn.Module, outputs: Any) -> Any:
    """A forward's outputs as FSDP2 returns them."""
    return module._get_fsdp_state()._cast_output_dtype(outputs) if is_sharded(module) else outputs  # type: ignore[operator]


def gathered_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The type that FSDP2 gathers a module's parameters in; None: their own."""
    return module._get_fsdp_state()._mp_policy.param_dtype if is_sharded(module) else None  # type: ignore[operator]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
