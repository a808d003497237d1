"""Attention within parts of one long row, as one operator: images or clips of several sizes after one another.

Where no flash attention is asked for, transformers splits queries, keys and values at lengths that it reads from a
tensor (`Qwen2VLVisionAttention` in `models/qwen2_vl/modeling_qwen2_vl.py`, 5.23, and some 30 models like it). Traced,
each length would be a symbol; here the operator reads them while it runs.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from optimum_memopt.engines.compile.torch_compat.fx_graph import LIBRARY

# With these excluded, as while an operator of this kind runs, autograd sees nothing.
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther")


@torch.library.custom_op(f"{LIBRARY}::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> Tensor:
    """Attend within each part.

    Args:
        query: [1, heads, tokens, width of a head], as `key` and `value`.
        bounds: [parts + 1] where parts begin, 0 first, and how many tokens there are.
        is_fused: by torch's operator; else by products and a softmax in float32 (`eager` in transformers).

    Returns:
        [1, tokens, heads, width], contiguous.

    Raises:
        RuntimeError: the parts are not as long as the row.
    """
    attended = _empty_like(query)
    lengths = _lengths(bounds)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    for part, result in zip(parts, attended.split(lengths, dim=1), strict=True):
        result.copy_(_attend(part, scale, is_fused).transpose(1, 2))
    return attended


@packed_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool) -> Tensor:
    return _empty_like(query)


@torch.library.custom_op(f"{LIBRARY}::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> list[Tensor]:
    """The gradients of query, key and value. Each part attends again: what kernels save for their backward differs by
    device and size, and is one more row of results."""
    lengths = _lengths(bounds)
    given = (query, key, value)
    gradients = [torch.empty_like(tensor) for tensor in given]
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in given), strict=True)
    results = zip(*(tensor.split(lengths, dim=2) for tensor in gradients), strict=True)
    for part, result, of_part in zip(parts, results, gradient.split(lengths, dim=1), strict=True):
        with _with_autograd(query.device.type):
            leaves = [tensor.detach().requires_grad_() for tensor in part]
            attended = _attend(leaves, scale, is_fused).transpose(1, 2).contiguous()
            found = torch.autograd.grad(attended, leaves, of_part)
        for tensor, each in zip(result, found, strict=True):
            tensor.copy_(each)
    return gradients


@packed_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (query, key, value)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.is_fused = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return *packed_attention_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.is_fused), None, None, None


packed_attention.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.optimum_memopt.packed_attention)
def _flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], bounds: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Floating-point operations for parts that are equally long, since no lengths are known."""
    return int(sdpa_flop_count(query, key, value)) // _parts(bounds)


@register_flop_formula(torch.ops.optimum_memopt.packed_attention_backward)
def _flops_of_backward(
    gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], bounds: Sequence[int],
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    of_results = (query[0], query[1], query[2], value[3])
    again = _flops(query, key, value, bounds)
    return again + int(sdpa_backward_flop_count(of_results, query, key, value)) // _parts(bounds)


def _parts(bounds: Sequence[int]) -> int:
    return max(bounds[0] - 1, 1)


def equal_parts(bounds: Tensor, tokens: int) -> Tensor:
    """Bounds of parts that are about equally long."""
    return torch.linspace(0, tokens, len(bounds), device=bounds.device).to(bounds.dtype)


def attention_of_parts(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> Tensor:
    """`packed_attention` under autocast too, which casts what attention is given."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return packed_attention(query, key, value, bounds, scale, is_fused)


def _attend(given: Sequence[Tensor], scale: float, is_fused: bool) -> Tensor:
    query, key, value = given
    if is_fused:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)


def _lengths(bounds: Tensor) -> list[int]:
    return (bounds[1:] - bounds[:-1]).tolist()


def _empty_like(query: Tensor) -> Tensor:
    batch, heads, tokens, width = query.shape
    return query.new_empty((batch, tokens, heads, width))


@contextlib.contextmanager
def _with_autograd(device_type: str) -> Iterator[None]:
    """Autograd within an operator, which is called behind it (`c10/core/impl/LocalDispatchKeySet.h`)."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.autocast(device_type, enabled=False),
        torch.enable_grad(),
    ):
        yield
