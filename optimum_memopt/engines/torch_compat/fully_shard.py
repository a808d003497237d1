"""FSDP2: the private names of `torch/distributed/fsdp/_fully_shard/` (torch 2.13, there since 2.9)."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.testing._internal.distributed.fake_pg import FakeStore

from optimum_memopt.engines.torch_compat.patches import Name, Patch

_FILES = "torch.distributed.fsdp._fully_shard"
SHARDED = Patch(
    "parameters that FSDP2 shards",
    "no plan under FSDP2",
    "torch",
    since="2.9",
    tested="2.9 to 2.15",
    names=(
        Name(
            f"{_FILES}._fsdp_param_group",
            "FSDPParamGroup",
            mentions=(
                *("fsdp_params", "mesh_info", "is_unsharded", "_all_gather_result", "_reshard_after_forward"),
                *("def unshard(", "def wait_for_unshard(", "def reshard("),
            ),
        ),
        Name(
            f"{_FILES}._fsdp_param",
            "FSDPParam",
            mentions=(
                *("padded_sharded_param_size", "sharded_param", "param_dtype", "reduce_dtype", "_module_info"),
                *("is_dtensor", "offload_to_cpu"),
            ),
        ),
        Name(
            f"{_FILES}._fsdp_state",
            "FSDPState",
            mentions=("_fsdp_param_group", "_mp_policy", "cast_forward_inputs", "output_dtype", "_apply_to_tensors"),
        ),
    ),
)


def sharded_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns the paths of the modules of each FSDP2 group, gathered at once; the model itself is left out."""
    groups = (tuple(filter(None, paths)) for paths, _ in _states(model))
    return tuple(filter(None, groups))


def _states(model: torch.nn.Module) -> list[tuple[tuple[str, ...], Any]]:
    """Returns FSDP2's states, each with the paths of its modules."""
    paths: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            paths.setdefault(module._get_fsdp_state(), []).append(path)
    return [(tuple(modules), state) for state, modules in paths.items()]


def _parameter_groups(state: Any) -> list[Any]:
    # A state may have several groups since torch 2.13.
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(filter(None, [state._fsdp_param_group])) if groups is None else list(groups)


def _sharded_parameters(model: torch.nn.Module) -> Iterator[Any]:
    return (each for _, state in _states(model) for group in _parameter_groups(state) for each in group.fsdp_params)


@dataclass(frozen=True)
class ShardedGroup:
    """A group of parameters that are gathered at once; sizes are in bytes.

    Attributes:
        modules: the paths of its modules.
        gathered: the size of all parameters, in the dtype of the gather.
        cast: the size of one rank's shard in that dtype, of parameters that are stored in another one.
        reduced: the size of all trainable parameters, in the dtype of the gradient reduction.
        gradient: the size of one rank's shard of the gradients.
        reshards: whether parameters are freed after the forward and gathered again for the backward.
        ranks: the number of ranks that share the parameters.
        is_open: whether they are gathered before the model's forward, and used until it returns; see
            `capture/regions.py`.
        reads_gradients: whether an input of its first module gets a gradient, which ends the group's backward.
    """

    modules: tuple[str, ...]
    gathered: int
    cast: int
    reduced: int
    gradient: int
    reshards: bool
    ranks: int
    is_open: bool = False
    reads_gradients: bool = True


def groups_of(model: torch.nn.Module) -> Iterator[ShardedGroup]:
    """Yields the groups of a model that has run. The group of the model's own parameters, if any, has an empty
    path."""
    for paths, state in _states(model):
        for group in _parameter_groups(state):
            yield _sharded_group(paths, group)


def unreduced_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of unreduced gradients of earlier micro-batches, which are reduced with the last one's; 0 for
    a model that is not sharded."""
    return sum(group.reduced for group in groups_of(model))


def _sharded_group(modules: tuple[str, ...], group: Any) -> ShardedGroup:
    # A parameter's dtypes are not known before the first forward.
    ranks = group.mesh_info.shard_mesh_size
    sizes = [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]
    kept = [parameter.sharded_param.dtype.itemsize for parameter in group.fsdp_params]
    gathered = [(parameter.param_dtype or parameter.sharded_param.dtype).itemsize for parameter in group.fsdp_params]
    trained = [
        (size, (parameter.reduce_dtype or parameter.param_dtype or parameter.sharded_param.dtype).itemsize, own)
        for size, parameter, own in zip(sizes, group.fsdp_params, kept, strict=True)
        if parameter.sharded_param.requires_grad
    ]
    return ShardedGroup(
        modules,
        ranks * sum(size * width for size, width in zip(sizes, gathered, strict=True)),
        sum(size * width for size, width, own in zip(sizes, gathered, kept, strict=True) if width != own),
        ranks * sum(size * width for size, width, _ in trained),
        sum(size * own for size, _, own in trained),
        group._reshard_after_forward,
        ranks,
    )


def shards(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns this rank's shards of the parameters, gathered or not, by parameter name."""
    found: dict[tuple[torch.nn.Module, str], torch.Tensor] = {}
    for parameter in _sharded_parameters(model):
        info = parameter._module_info
        places = zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True)
        found.update(dict.fromkeys(places, parameter.sharded_param))
    if not found:
        return {}
    return {
        f"{path}.{name}" if path else name: found[module, name]
        for path, module in model.named_modules()
        for name in dict(module.named_parameters(recurse=False))
        if (module, name) in found
    }


def gathered(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the parameters that are not sharded at the moment."""
    return [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]


def fake_group(ranks: int) -> None:
    """Make a process group whose collectives transfer nothing; this process is rank 0."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def is_sharded(model: torch.nn.Module) -> bool:
    """True if FSDP2 shards any part of a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def has_other_shards(model: torch.nn.Module) -> bool:
    """True if a forward computes with a shard of a parameter: FSDP2 does not gather it, or not completely."""
    # Compares names, since parameters may be replaced when weights are loaded after FSDP2 has sharded them.
    own = shards(model).keys()
    divided = any(parameter.is_dtensor for parameter in _sharded_parameters(model))
    return divided or any(isinstance(each, DTensor) and name not in own for name, each in model.named_parameters())


def is_offloaded(model: torch.nn.Module) -> bool:
    """True if FSDP2 keeps shards on the host and computes on another device."""
    return any(each.offload_to_cpu and each.device.type != "cpu" for each in _sharded_parameters(model))


def gather(module: torch.nn.Module) -> None:
    """Gather the parameters of the module's group, as before its forward."""
    if isinstance(module, FSDPModule):
        module.unshard()


@contextlib.contextmanager
def gathered_again(module: torch.nn.Module) -> Iterator[None]:
    """Gather a module's group around a forward that a backward recomputes.

    Reshards afterwards, unless the group was gathered, or its gather had begun, for the module's own backward.
    """
    groups = _parameter_groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else []
    missing = [group for group in groups if not group.is_unsharded and group._all_gather_result is None]
    try:
        for group in groups:
            # Not by the forward hooks, after which FSDP2 would gather for another backward.
            group.unshard()
            group.wait_for_unshard()
        yield
    finally:
        for group in missing:
            group.reshard()


def with_cast_inputs(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a forward's arguments, cast as FSDP2 casts them."""
    if not isinstance(module, FSDPModule) or not module._get_fsdp_state()._mp_policy.cast_forward_inputs:
        return args, kwargs
    dtype = gathered_dtype(module)
    return _cast(args, dtype), _cast(kwargs, dtype)


def with_cast_outputs(module: torch.nn.Module, outputs: Any) -> Any:
    """Returns a forward's outputs, cast as FSDP2 casts them."""
    if not isinstance(module, FSDPModule):
        return outputs
    return _cast(outputs, module._get_fsdp_state()._mp_policy.output_dtype)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    # As in `FSDPState`, which has methods for this since torch 2.13.
    return values if dtype is None else _apply_to_tensors(functools.partial(_cast_fp_tensor, dtype), values)


def gathered_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Returns the dtype in which FSDP2 gathers a module's parameters; None: their own."""
    return module._get_fsdp_state()._mp_policy.param_dtype if isinstance(module, FSDPModule) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
