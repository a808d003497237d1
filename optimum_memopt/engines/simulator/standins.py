"""Stand-ins for an absent CUDA device: a model is traced or run on the CPU as it would be there.

torch cannot trace a backward with fake CUDA tensors without a CUDA device. So tensors are fake CPU tensors, attention
calls CUDA's operators, and autocast casts as on CUDA.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

from optimum_memopt.engines.simulator.devices import Device
from optimum_memopt.engines.torch_compat import autocast, int8_products, kernels
from optimum_memopt.engines.torch_compat.fake_tensors import with_attributes, without_tracebacks
from optimum_memopt.engines.torch_compat.kernels import HALVES, Multiprocessors

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
            stack.enter_context(int8_products.as_on_cuda())
        if dtype is not None:
            stack.enter_context(torch.autocast(here, dtype))
        yield


@contextlib.contextmanager
def eager_standin(device: Device | None) -> Iterator[None]:
    """Do the same as `traced_for`, for code that runs without a compiler."""
    with traced_for(device, None), contextlib.ExitStack() as stack:
        stack.enter_context(int8_products.without_outliers())
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
    mask = None if attn_mask is None or taken == "math" else _bias(attn_mask, query, key)
    if taken == "math":
        results = operator(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    elif taken == "flash":
        results = operator(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif taken == "cudnn":
        results = operator(query, key, value, mask, True, dropout_p, is_causal, False, scale=scale)
    else:
        results = operator(query, key, value, mask, True, dropout_p, is_causal, scale=scale)
    output: torch.Tensor = results[0]
    return output


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns a mask as torch passes it to a kernel: as numbers, padded to rows of a multiple of 8, for all heads."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if padding := -mask.size(-1) % 8:
        mask = torch.nn.functional.pad(mask, (0, padding))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
