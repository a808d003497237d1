"""Stand-ins for absent ranks: a model is sharded by FSDP2 itself, in a process group that transfers nothing."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from optimum_memopt.compat.accelerate import final_norm
from optimum_memopt.compat.bitsandbytes import is_4bit, is_8bit_weight
from optimum_memopt.compat.torch import dtype_name
from optimum_memopt.compat.transformers import embeddings, layer_classes
from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.torch_compat.fully_shard import fake_group
from optimum_memopt.errors import MemOptError


@contextlib.contextmanager
def planned_ranks(ranks: int, device: str) -> Iterator[DeviceMesh | None]:
    """Make a fake process group within the context, with this process as its first rank. Yields its device mesh, None
    for a single rank.

    Raises:
        MemOptError: this process already belongs to a process group.
    """
    if ranks == 1:
        yield None
        return
    if torch.distributed.is_initialized():
        raise MemOptError("steps of several ranks cannot be predicted in a distributed process; use a single process")
    # With a process group, torch installs a hook that prefixes each line of a traceback with the rank.
    before = sys.excepthook
    fake_group(ranks)
    try:
        yield init_device_mesh(device, (ranks,))
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = before


def shard(model: torch.nn.Module, mesh: DeviceMesh, half: torch.dtype | None) -> None:
    """Shard a model as accelerate does (1.15, `fsdp2_prepare_model` in `utils/fsdp_utils.py`): each layer, embeddings,
    the last norm with the head, and the rest. Weights of 4 bits that are packed into integers stay whole.

    Args:
        half: dtype of mixed precision; None: no mixed precision.

    Raises:
        MemOptError: weights have 8 bits, packed weights of 4 bits would be cast to `half`, or a tied head would be in
            another group than the embeddings.
    """
    policy = MixedPrecisionPolicy() if half is None else MixedPrecisionPolicy(half, half, half)
    if any(map(is_8bit_weight, model.parameters())):
        raise MemOptError("--fsdp: FSDP2 cannot shard weights of 8 bits; use --quantize nf4,storage=bfloat16")
    quantized = set(filter(is_4bit, model.parameters()))
    if half is not None:
        _check_packed(quantized, half)
    if half is not None and not quantized:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "ignored_params": {weight for weight in quantized if not weight.is_floating_point()},
    }
    first, head = embeddings(model, "input"), embeddings(model, "output")
    is_tied = head is not None and getattr(first, "weight", None) is head.weight
    for module in _layers(model):
        fully_shard(module, reshard_after_forward=True, **how)
    inside = {inner for module in model.modules() if isinstance(module, FSDPModule) for inner in module.modules()}
    if is_tied and (first in inside) != (head in inside):
        # `fully_shard` raises ValueError, in a Trainer too: both must be in one group.
        names = {module: name for name, module in model.named_modules()}
        raise MemOptError(
            f"--fsdp: the head shares its weight with {names[first]}, which FSDP2 shards in another group; plan a "
            "model with tie_word_embeddings=False"
        )
    if first is not None and not is_tied and first not in inside:
        fully_shard(first, reshard_after_forward=True, **how)
    last = (final_norm(model), *((first,) if is_tied else ()), head)
    if tail := [module for module in last if module is not None and module not in inside]:
        fully_shard(tail, reshard_after_forward=False, **how)
    fully_shard(model, **how)


def _check_packed(quantized: Iterable[torch.Tensor], half: torch.dtype) -> None:
    """Raises MemOptError if weights of 4 bits would be cast to `half`."""
    for weight in quantized:
        if weight.is_floating_point() and weight.dtype != half:
            packed, gathered = map(dtype_name, (weight.dtype, half))
            raise MemOptError(
                f"4-bit weights are packed into {packed}: FSDP2 gathers them in {gathered}, which changes them; "
                f"use storage={gathered} or storage=uint8"
            )


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the modules that accelerate shards as layers, innermost first: instances of the model's layer classes,
    or its equal layers if it names none."""
    names = layer_classes(model)
    equal = {layer for group in layer_groups(model) for layer in group.values()}
    modules = (module for module in model.modules() if module is not model)
    return [each for each in modules if (type(each).__name__ in names if names else each in equal)][::-1]
