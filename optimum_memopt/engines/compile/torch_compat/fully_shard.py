"""FSDP2: the private names of `torch/distributed/fsdp/_fully_shard/` (torch 2.13, there since 2.9)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def sharded_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """The paths of modules whose parameters FSDP2 gathers at once, by group; the model itself is not among them."""
    groups: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        if path and isinstance(module, FSDPModule):
            groups.setdefault(id(module._get_fsdp_state()), []).append(path)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True)
class GroupState:
    """Parameters that FSDP2 gathers at once, in bytes; see `memory.sharding.ShardedGroup`.

    Attributes:
        is_gathered: now.
    """

    modules: tuple[str, ...]
    gathered: int
    cast: int
    reduced: int
    gradient: int
    reshards: bool
    ranks: int
    is_gathered: bool


def group_states(model: torch.nn.Module) -> Iterator[GroupState]:
    """The groups of a model that has run, its own last, where it has parameters itself."""
    paths: dict[int, list[str]] = {}
    states: dict[int, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
            paths.setdefault(id(state), []).append(path)
    for key, state in sorted(states.items(), key=lambda entry: "" in paths[entry[0]]):
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            yield _group_state(tuple(paths[key]), group)


def unreduced_bytes(model: torch.nn.Module) -> int:
    """Bytes of the gradients of earlier micro-batches, which are reduced with those of the last; 0 for a model that is
    not sharded."""
    return sum(group.reduced for group in group_states(model))


def _group_state(modules: tuple[str, ...], group: Any) -> GroupState:
    # Before its first forward a parameter's types are not known.
    ranks = group.mesh_info.shard_mesh_size
    sizes = [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
    kept = [parameter.sharded_param.dtype.itemsize for parameter in group.fsdp_params]
    gathered = [(parameter.param_dtype or parameter.sharded_param.dtype).itemsize for parameter in group.fsdp_params]
    trained = [
        (size, (parameter.reduce_dtype or parameter.param_dtype or parameter.sharded_param.dtype).itemsize, own)
        for size, parameter, own in zip(sizes, group.fsdp_params, kept, strict=True)
        if parameter.sharded_param.requires_grad
    ]
    return GroupState(
        modules,
        ranks * sum(size * width for size, width in zip(sizes, gathered, strict=True)),
        sum(size * width for size, width, own in zip(sizes, gathered, kept, strict=True) if width != own),
        ranks * sum(size * width for size, width, _ in trained),
        sum(size * own for size, _, own in trained),
        group._reshard_after_forward,
        ranks,
        group.is_unsharded,
    )


def shards(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This rank's shares of the sharded parameters, by their names in the model, gathered or not."""
    found: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
                for parameter in group.fsdp_params:
                    info, share = parameter._module_info, parameter.sharded_param
                    places = zip(
                        (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
                    )
                    found.update(dict.fromkeys(places, share))
    return {
        f"{path}.{name}" if path else name: found[module, name]
        for path, module in model.named_modules()
        for name in dict(module.named_parameters(recurse=False))
        if (module, name) in found
    }


def gathered(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of a sharded model that are whole; none of any other model."""
    parameters: list[torch.Tensor] = list(model.parameters())
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return whole if len(whole) < len(parameters) else []


def fake_group(ranks: int) -> None:
    """Make a process group whose collectives move nothing; this process is its first rank."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def is_sharded(model: torch.nn.Module) -> bool:
    """True for a model of which FSDP2 shards any part."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def gather(module: torch.nn.Module) -> None:
    """Gather the parameters of the module's group, as before its forward."""
    if isinstance(module, FSDPModule):
        module.unshard()


def with_cast_inputs(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward's arguments as FSDP2 gives them to it."""
    if not isinstance(module, FSDPModule):
        return args, kwargs
    return module._get_fsdp_state()._cast_forward_inputs(args, kwargs)


def with_cast_outputs(module: torch.nn.Module, outputs: Any) -> Any:
    """A forward's outputs as FSDP2 returns them."""
    return module._get_fsdp_state()._cast_output_dtype(outputs) if isinstance(module, FSDPModule) else outputs


def gathered_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The type that FSDP2 gathers a module's parameters in; None: their own."""
    return module._get_fsdp_state()._mp_policy.param_dtype if isinstance(module, FSDPModule) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What lies on this rank of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
