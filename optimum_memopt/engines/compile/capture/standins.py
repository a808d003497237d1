"""Traces a model on the CPU as on an absent CUDA device, and as one rank of several.

torch cannot trace a backward with fake CUDA tensors without a CUDA device. So tensors are fake CPU tensors, attention
calls CUDA's operators, and autocast casts as on CUDA. A model is sharded by FSDP2 itself, in a process group that
transfers nothing.
"""

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from optimum_memopt.compat.accelerate import final_norm
from optimum_memopt.compat.bitsandbytes import is_4bit
from optimum_memopt.compat.transformers import embeddings, layer_classes
from optimum_memopt.engines.compile.capture.regions import layer_groups
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.torch_compat import autocast, kernels
from optimum_memopt.engines.torch_compat.fake_tensors import with_attributes, without_tracebacks
from optimum_memopt.engines.torch_compat.fully_shard import fake_group
from optimum_memopt.engines.torch_compat.kernels import HALVES, Multiprocessors
from optimum_memopt.errors import MemOptError

_HOPPER = (9, 0)
_AMPERE = (8, 0)


def stand_in_place(target: Device | None) -> torch.device:
    """Returns the device of the stand-in tensors for a target device; None as target: this machine's device."""
    return torch.device("cuda" if torch.cuda.is_available() and target is None else "cpu")


def multiprocessors(target: Device | None, here: torch.device) -> Multiprocessors | None:
    """Returns the multiprocessors of the target, or of the tensors' device without one; None if not a CUDA device."""
    return target.cuda if target is not None else kernels.multiprocessors_of(here)


@contextlib.contextmanager
def traced_for(device: Device | None, dtype: torch.dtype | None, here: str = "cpu") -> Iterator[None]:
    """Trace forwards within the context as on a device; operators are those of `here` if it is no CUDA device. Errors
    of operators are raised without being logged as well."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_tracebacks())
        if device is not None and device.cuda is not None:
            stack.enter_context(autocast.casts_of_cuda())
            stack.enter_context(_attention_of(device))
        if dtype is not None:
            stack.enter_context(torch.autocast(here, dtype))
        yield


@contextlib.contextmanager
def eager_standin(device: Device | None) -> Iterator[None]:
    """Do the same as `traced_for`, for code that runs without a compiler."""
    with traced_for(device, None), contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(autocast.of_any_device(device.capability >= _AMPERE))
        if device is not None and device.cuda is not None:
            stack.enter_context(kernels.fused_dropout())
            stack.enter_context(kernels.foreach_optimizers())
        yield


def _attention_of(device: Device) -> contextlib.AbstractContextManager[Any]:
    capability = device.capability

    # A function, since dynamo would not trace a `functools.partial` in place of torch's function.
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _attention(capability, *args, **kwargs)

    return with_attributes([(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)])


def kernel(
    capability: tuple[int, int],
    is_half: bool,
    has_mask: bool,
    has_dropout: bool,
    shares_keys: bool,
    fused: Collection[str] = ("cudnn", "flash", "efficient"),
) -> str:
    """Returns the attention kernel that torch uses on CUDA (2.13, `transformers/cuda/sdp_utils.cpp`): cudnn, flash,
    efficient or math.

    Args:
        has_mask: a mask is given; flash supports none.
        shares_keys: there are fewer key heads than query heads; the kernel expands them.
        fused: the fused kernels that support the sizes and strides.
    """
    if is_half and capability >= _HOPPER and not has_dropout and "cudnn" in fused:
        return "cudnn"
    if is_half and capability >= _AMPERE and not has_mask and "flash" in fused:
        return "flash"
    return "math" if shares_keys or "efficient" not in fused else "efficient"


def _fused_kernels(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> list[str]:
    """Returns the fused kernels that support these sizes and strides. All need rows without gaps, also in a mask:
    T5's biases, stored with heads last, have gaps.

    cuDNN's kernel is left out if training avoids it (`kernels.cudnn_attention_warning`).
    """
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if query.dim() != 4 or any(tensor.stride(-1) != 1 for tensor in tensors):
        return []
    of_keys, of_values = query.size(-1), value.size(-1)
    step = 8 if query.dtype in HALVES else 4
    is_square = not is_causal or query.size(-2) == key.size(-2)
    is_avoided = mask is not None and kernels.cudnn_may_give_nan(capability, key.size(-2))
    taken = {
        "cudnn": max(of_keys, of_values) <= 128 and of_keys % 8 == of_values % 8 == 0 and not is_avoided,
        "flash": of_keys == of_values <= 256 and is_square,
        "efficient": of_keys % step == of_values % step == 0,
    }
    return [name for name, is_taken in taken.items() if is_taken]


def _attention(
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by the operator that CUDA would use."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    shares_keys = enable_gqa and query.size(1) != key.size(1)
    fused = _fused_kernels(capability, query, key, value, attn_mask, is_causal)
    taken = kernel(capability, query.dtype in HALVES, attn_mask is not None, dropout_p > 0, shares_keys, fused)
    operator = kernels.ATTENTION[taken]
    if taken == "math":
        return operator(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if taken == "flash":
        return operator(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    mask = None if attn_mask is None else _bias(attn_mask, query, key)
    if taken == "cudnn":
        return operator(query, key, value, mask, True, dropout_p, is_causal, False, scale=scale)[0]
    return operator(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a mask as torch passes it to a kernel: as numbers, padded to rows of a multiple of 8, for all heads."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if padding := -mask.size(-1) % 8:
        mask = torch.nn.functional.pad(mask, (0, padding))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


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
        MemOptError: packed weights of 4 bits would be cast to `half`.
    """
    policy = MixedPrecisionPolicy() if half is None else MixedPrecisionPolicy(half, half, half)
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
    for module in _layers(model):
        fully_shard(module, reshard_after_forward=True, **how)
    inside = {inner for module in model.modules() if isinstance(module, FSDPModule) for inner in module.modules()}
    first, head = embeddings(model, "input"), embeddings(model, "output")
    is_tied = head is not None and getattr(first, "weight", None) is head.weight
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
            packed, gathered = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, half))
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
