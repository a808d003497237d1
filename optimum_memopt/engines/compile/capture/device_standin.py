"""Traces a model on the CPU as it would be traced on a CUDA device that is not there.

torch cannot trace a backward with fake CUDA tensors where there is no device. So tensors are fake CPU tensors,
attention calls CUDA's operators, and autocast casts what it casts on CUDA.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.torch_compat import kernels
from optimum_memopt.engines.compile.torch_compat.fake_tensors import without_tracebacks
from optimum_memopt.engines.compile.torch_compat.kernels import Multiprocessors

_HALVES = (torch.bfloat16, torch.float16)
_HOPPER = (9, 0)
_AMPERE = (8, 0)


def stand_in_place(target: Device | None) -> torch.device:
    """The device of the tensors that stand for those of a device that is planned for; None: this machine's."""
    return torch.device("cuda" if torch.cuda.is_available() and target is None else "cpu")


def multiprocessors(target: Device | None, here: torch.device) -> Multiprocessors | None:
    """Those of the CUDA device that is planned for, or that tensors lie on; None where it is no CUDA device."""
    return target.cuda if target is not None else kernels.multiprocessors_of(here)


@contextlib.contextmanager
def traced_for(device: Device | None, dtype: torch.dtype | None, here: str = "cpu") -> Iterator[None]:
    """Forwards that are traced within are a device's; without one of CUDA, operators are those of `here`. An
    operator's error is raised, and not logged too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_tracebacks())
        if device is not None and device.cuda is not None:
            if dtype is not None:
                stack.enter_context(kernels.autocast_lists())
            stack.enter_context(_attention_of(device))
        if dtype is not None:
            stack.enter_context(torch.autocast(here, dtype))
        yield


@contextlib.contextmanager
def eager_standin(device: Device | None) -> Iterator[None]:
    """Code that runs within without a compiler calls a device's operators; without one those of the tensors' own. An
    operator's error is raised, and not logged too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_tracebacks())
        if device is not None and device.cuda is not None:
            stack.enter_context(kernels.autocast_lists())
            stack.enter_context(kernels.fused_dropout())
            stack.enter_context(kernels.foreach_optimizers())
            stack.enter_context(_attention_of(device))
        yield


@contextlib.contextmanager
def _attention_of(device: Device) -> Iterator[None]:
    before, capability = torch.nn.functional.scaled_dot_product_attention, device.capability

    # dynamo traces it in the place of torch's, as it does no partial object.
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return _attention(capability, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = before


def kernel(capability: tuple[int, int], is_half: bool, has_mask: bool, has_dropout: bool, shares_keys: bool) -> str:
    """The attention kernel that torch takes on CUDA (2.13, `transformers/cuda/sdp_utils.cpp`): cudnn, flash, efficient
    or math. cuDNN is not taken with a mask (`kernels.cudnn_attention_warning`).

    Args:
        shares_keys: fewer heads of keys than of queries, expanded by the kernel.
    """
    if not is_half:
        return "math" if shares_keys else "efficient"
    if capability >= _HOPPER and not has_mask and not has_dropout:
        return "cudnn"
    if has_mask or capability < _AMPERE:
        return "math" if shares_keys else "efficient"
    return "flash"


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
    """As `torch.nn.functional.scaled_dot_product_attention`."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    shares_keys = enable_gqa and query.size(1) != key.size(1)
    taken = kernel(capability, query.dtype in _HALVES, attn_mask is not None, dropout_p > 0, shares_keys)
    operator = kernels.ATTENTION[taken]
    if taken == "math":
        return operator(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if taken == "flash":
        return operator(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    mask = None if attn_mask is None else _bias(attn_mask, query, key)
    if taken == "cudnn":
        return operator(query, key, value, mask, True, dropout_p, is_causal, False, scale=scale)[0]
    return operator(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as torch gives it to the kernel: numbers, rows of a multiple of 8, all heads."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if padding := -mask.size(-1) % 8:
        mask = torch.nn.functional.pad(mask, (0, padding))[..., : mask.size(-1)]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
