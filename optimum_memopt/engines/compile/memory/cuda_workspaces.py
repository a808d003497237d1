"""What PyTorch's CUDA operators hold while they run beside their results, in bytes. Pure.

From torch's sources (2.13, `aten/src/ATen/native/`), and compared with the caching allocator by
`tests/cuda/test_workspaces.py`. Operators that are not here take less than a percent of what they return.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from optimum_memopt.engines.compile.graph.joint import elements, symbolic
from optimum_memopt.engines.compile.torch_compat.kernels import Multiprocessors

_ZERO = sympy.Integer(0)
_HALVES = (torch.float16, torch.bfloat16)
_WARP = 32
# Sorting pays from then on (`cuda/Embedding.cu`).
_SORTED_INDICES = 3072
_ROWS_PER_PARTIAL_SUM = 10
# Rows and columns of a block of the memory-efficient kernel, and the lock and counter of each.
_BLOCK = 64
_LOCK_BYTES = 16


def workspace(name: str, arguments: Sequence[Any], result: Any, device: Multiprocessors) -> sympy.Expr:
    """Of a call of an ATen operator.

    Args:
        name: without namespace and overload.
        arguments: positional ones; tensors may be fake.
        result: of the call.
        device: that runs it.
    """
    if name in _REDUCTIONS:
        return _reduction(arguments[0], arguments[1:], result, device)
    rule = _RULES.get(name)
    return rule(arguments) if rule is not None else _ZERO


def _reduction(source: torch.Tensor, options: Sequence[Any], result: Any, device: Multiprocessors) -> sympy.Expr:
    dims = next((option for option in options if isinstance(option, list | tuple)), None)
    reduced = {dim % source.dim() for dim in dims} if dims else set(range(source.dim()))
    if not source.dim() or not isinstance(result, torch.Tensor):
        return _ZERO
    sizes, strides = [symbolic(size) for size in source.shape], [symbolic(step) for step in source.stride()]
    outputs = sympy.Mul(*(size for dim, size in enumerate(sizes) if dim not in reduced))
    inputs = sympy.Mul(*(size for dim, size in enumerate(sizes) if dim in reduced))
    fastest = [dim for dim, step in enumerate(strides) if step == 1 and sizes[dim] != 1]
    along_fastest = not fastest or fastest[-1] in reduced
    # The innermost dimension that stays, with those that are one with it in memory.
    innermost = sympy.Integer(1)
    for dim in reversed(range(source.dim())):
        if dim in reduced:
            break
        innermost *= sizes[dim]
    accumulated = torch.promote_types(result.dtype, torch.float32) if result.dtype.is_floating_point else torch.int64
    return ReductionBuffer(
        outputs, inputs, innermost, int(along_fastest), accumulated.itemsize, device.count, device.threads
    )


class ReductionBuffer(sympy.Function):  # type: ignore[misc]
    """Partial results of a reduction whose inputs are split across blocks: `setReduceConfig` and
    `ReduceConfig::global_memory_size` of `cuda/Reduce.cuh`.

    Args:
        outputs: results.
        inputs: of each of them.
        innermost: size of the fastest dimension that stays.
        along_fastest: 1 where the dimension with stride 1 is reduced.
        itemsize: bytes of an accumulated value.
        multiprocessors: of the device.
        threads: that are resident on each.
    """

    @classmethod
    def eval(cls, *arguments: sympy.Expr) -> sympy.Integer | None:
        if not all(argument.is_Integer for argument in arguments):
            return None
        return sympy.Integer(_reduction_buffer(*map(int, arguments)))


def _reduction_buffer(
    outputs: int, inputs: int, innermost: int, along_fastest: int, itemsize: int, multiprocessors: int, threads: int
) -> int:
    if not outputs or not inputs:
        return 0
    per_load = 1 if along_fastest else next(size for size in (4, 2, 1) if innermost % size == 0)
    width, height = (inputs, outputs) if along_fastest else (outputs // per_load, inputs)
    if along_fastest and outputs == 1 and width >= 128:
        width //= 4
    block_threads = 512 // per_load
    width_power, height_power = (min(_last_power(size), block_threads) for size in (width, height))
    block_width = min(width_power, _WARP)
    block_height = min(height_power, block_threads // block_width)
    block_width = min(width_power, block_threads // block_height)
    split = block_width if along_fastest else 1
    outputs_per_block = 1 if along_fastest else block_width
    per_thread = _blocks(inputs, split)
    is_split_in_block = per_thread >= block_height * 16 or per_thread >= 256
    if is_split_in_block:
        split *= block_height
    else:
        outputs_per_block *= block_height
    per_thread = _blocks(inputs, split)
    most_blocks = multiprocessors * (threads // (block_width * block_height))
    grid = _blocks(outputs // per_load, outputs_per_block)
    if not is_split_in_block or per_thread < 256 or grid > most_blocks:
        return 0
    blocks_per_output = max(min(_blocks(most_blocks, grid), _blocks(per_thread, 16)), _blocks(per_thread, 256))
    if blocks_per_output <= 1:
        return 0
    partial = outputs * blocks_per_output * (1 if along_fastest else block_width * per_load)
    semaphores = 4 * grid
    return partial * itemsize + semaphores


def _last_power(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _softmax_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """The gradient times the output (`softmax_backward_cuda` of `cuda/SoftMax.cu`)."""
    return elements(arguments[0]) * arguments[0].dtype.itemsize


def _embedding_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Sorted indices, and partial sums of rows (`cuda/EmbeddingBackwardKernel.cu`)."""
    gradient, indices, rows = arguments[0], arguments[1], symbolic(arguments[2])
    count = elements(indices)
    segments = sympy.Min(count, rows)
    partials = sympy.floor(count / _ROWS_PER_PARTIAL_SUM) + segments
    bookkeeping = 8 * (3 * count + 2 * segments + partials)
    held = bookkeeping + 4 * partials * symbolic(gradient.shape[-1])
    return sympy.Piecewise((held, count > _SORTED_INDICES), (_ZERO, True))


def _efficient_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """The sum of output times gradient, and the query's gradient in float32 (`transformers/cuda/mem_eff_attention`);
    above a head of 128 in half precision those of key and value, too."""
    query, key = arguments[1], arguments[2]
    batch, heads, length, width = map(symbolic, query.shape)
    blocks = sympy.ceiling(length / _BLOCK) * sympy.ceiling(width / _BLOCK)
    held = batch * heads * (blocks * (4 * _BLOCK**2 + _LOCK_BYTES) + 4 * length)
    if query.dtype in _HALVES and width > 2 * _BLOCK:
        keys = sympy.ceiling(symbolic(key.shape[2]) / _BLOCK) * _BLOCK
        held += 2 * batch * heads * keys * sympy.ceiling(width / _BLOCK) * _BLOCK * 4
    return held


def _flash_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """The query's gradient in float32, the softmax's sums, and copies of output and gradient; with fewer heads of keys
    than of queries, key and value gradients of all heads (`transformers/cuda/flash_attn/flash_api.cpp`)."""
    query, key = arguments[1], arguments[2]
    batch, heads, length, width = map(symbolic, query.shape)
    rounded = sympy.ceiling(length / 128) * 128
    head = sympy.ceiling(width / 32) * 32
    held = batch * heads * (rounded * (head * 4 + 4) + 2 * length * width * query.dtype.itemsize)
    if symbolic(key.shape[1]) != heads:
        held += 2 * batch * heads * symbolic(key.shape[2]) * width * key.dtype.itemsize
    return held


_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "linalg_vector_norm"})
_RULES: dict[str, Callable[[Sequence[Any]], sympy.Expr]] = {
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
