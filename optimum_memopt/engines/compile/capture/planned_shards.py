"""A model that is sharded as a Trainer under FSDP2 shards it, in one process that stands for one rank of several.

FSDP2 itself runs, on fake tensors, in a process group that moves nothing.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from optimum_memopt.compat import embeddings, final_norm, layer_classes
from optimum_memopt.engines.compile.capture.regions import layer_groups
from optimum_memopt.engines.compile.torch_compat.fully_shard import fake_group
from optimum_memopt.errors import MemOptError


@contextlib.contextmanager
def planned_ranks(ranks: int, device: str) -> Iterator[DeviceMesh | None]:
    """A process group of which this process is the first rank; None for a single one.

    Raises:
        MemOptError: this process is in one already.
    """
    if ranks == 1:
        yield None
        return
    if torch.distributed.is_initialized():
        raise MemOptError("steps of several ranks are predicted in a process that is not itself one of several")
    # torch puts the rank in front of each line of a traceback from then on.
    before = sys.excepthook
    fake_group(ranks)
    try:
        yield init_device_mesh(device, (ranks,))
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = before


def shard(model: torch.nn.Module, mesh: DeviceMesh, half: torch.dtype | None) -> None:
    """Shard a model as accelerate does (1.15, `fsdp2_prepare_model` in `utils/fsdp_utils.py`): each layer, embeddings,
    the last norm with the head, and the rest.

    Args:
        half: of its mixed precision; None: none.
    """
    policy = MixedPrecisionPolicy() if half is None else MixedPrecisionPolicy(half, half, half)
    if half is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    names = layer_classes(model)
    equal = {layer for group in layer_groups(model) for layer in group.values()}
    for module in reversed(list(model.modules())):
        is_layer = type(module).__name__ in names if names else module in equal
        if is_layer and module is not model:
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    inside = {inner for module in model.modules() if isinstance(module, FSDPModule) for inner in module.modules()}
    first, head = embeddings(model, "input"), embeddings(model, "output")
    is_tied = head is not None and getattr(first, "weight", None) is head.weight
    if first is not None and not is_tied and first not in inside:
        fully_shard(first, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    last = (final_norm(model), *((first,) if is_tied else ()), head)
    if tail := [module for module in last if module is not None and module not in inside]:
        fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
