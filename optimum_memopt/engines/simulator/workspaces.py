"""Workspaces: the bytes that an operator holds while it runs, beside its results.

Taken from torch's sources (2.13, `aten/src/ATen/`) and compared with its allocators by
`tests/unit/test_cpu_workspaces.py` and `tests/cuda/test_workspaces.py`. The workspaces of other CUDA operators are
less than a percent of their results.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.engines.simulator.own_operators import sizes_of
from optimum_memopt.engines.torch_compat import dynamo, kernels
from optimum_memopt.engines.torch_compat.fused_lm_head import token_chunk
from optimum_memopt.engines.torch_compat.kernels import HALVES, Multiprocessors
from optimum_memopt.engines.torch_compat.traced_sizes import elements, symbolic

_ZERO = sympy.Integer(0)
_FLOAT_BYTES = 4
# Columns of a block of the attention matrix; numbers of its rows, and the lengths from which the larger ones apply.
_KEY_BLOCK = 512
_SHORT, _MEDIUM, _LONG = 32, 64, 256
_MEDIUM_FROM, _LONG_FROM = 192, 768
# oneDNN packs a factor in blocks of 32 rows and 64 columns; its tables take 1,152 bytes, a product's scale 4 bytes.
_ONEDNN_ROWS, _ONEDNN_COLUMNS = 32, 64
_ONEDNN_OVERHEAD = 1152 + 4
_WARP = 32
# Above this number of indices they are sorted (`cuda/Embedding.cu`).
_SORTED_INDICES = 3072
_ROWS_PER_PARTIAL_SUM = 10
# Rows and columns of a block of the memory-efficient kernel, and bytes of its lock and counter.
_BLOCK = 64
_LOCK_BYTES = 16


def operator_workspace(target: Any, arguments: Sequence[Any], result: Any, cuda: Multiprocessors | None) -> sympy.Expr:
    """Returns the workspace of an operator's call, in bytes.

    Args:
        arguments: positional arguments; tensors may be fake.
        cuda: the CUDA device that runs it, wherever the tensors are; None: the tensors' own device.
    """
    if (own := sizes_of(target)) is not None:
        on_cuda = cuda is not None or any(each.device.type == "cuda" for each in tensors_in(result))
        return sympy.sympify(own(arguments, on_cuda).workspace)
    name = dynamo.operator_name(target)
    if cuda is not None and name in _REDUCTIONS:
        return _reduction(arguments[0], arguments[1:], result, cuda)
    if cuda is None and (rule_of_result := _CPU_RULES_OF_RESULT.get(name)) is not None:
        is_on_cpu = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        return rule_of_result(arguments, result) if is_on_cpu else _ZERO
    rule = (_CPU_RULES if cuda is None else _CUDA_RULES).get(name)
    return rule(arguments) if rule is not None else _ZERO


def _bytes(tensor: torch.Tensor) -> sympy.Expr:
    return elements(tensor) * tensor.dtype.itemsize


def _casts(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """Returns the bytes of casts of operands with another dtype (`native/TensorIterator.cpp`); on other devices the
    kernel casts each element."""
    operands = [operand for operand in arguments if isinstance(operand, torch.Tensor) and operand.dim()]
    dtype = result.dtype
    if dtype == torch.bool and operands:
        # A comparison computes in the promoted dtype of its operands.
        dtype = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    return sympy.Add(*(elements(operand) for operand in operands if operand.dtype != dtype)) * dtype.itemsize


def _dequantized(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of a 4-bit weight in the dtype of the input, and of its scales in float32 if those are
    quantized too (bitsandbytes 0.50, `_dequant_linear_fallback` in `backends/cuda/ops.py`, for more rows than its own
    kernel supports)."""
    given, _, shape, scales, block = arguments[:5]
    count = math.prod(shape)
    blocks = -(-count // block)
    is_double = bool(elements(scales) != blocks)
    return sympy.Integer(count * given.dtype.itemsize + is_double * blocks * _FLOAT_BYTES)


def _int8_product(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of the sums of a product of 8-bit codes in int32, and of its result in float16, before that is
    converted (bitsandbytes 0.50, `int8_mm_dequant` in `backends/cuda/ops.py`)."""
    codes, weight = arguments[:2]
    results = elements(codes) / symbolic(codes.shape[-1]) * symbolic(weight.shape[0])
    return results * (torch.int32.itemsize + torch.float16.itemsize)


def _outliers(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of a search for outliers: absolute values in float16, and a mask (`int8_vectorwise_quant`)."""
    return elements(arguments[0]) * (torch.float16.itemsize + torch.bool.itemsize)


def _int8_linear(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of a product with an 8-bit weight: codes and scales of the rows, beside what the search for
    outliers or the product takes. Columns with outliers are not counted."""
    given, weight = arguments[:2]
    rows = elements(given) / symbolic(given.shape[-1])
    half = 0 if given.dtype == torch.float16 else elements(given) * torch.float16.itemsize
    # There is no result yet during the search.
    search = half + _outliers(arguments) - rows * symbolic(weight.shape[0]) * given.dtype.itemsize
    return elements(given) + rows * _FLOAT_BYTES + sympy.Max(search, _int8_product(arguments))


def _accumulated(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """Returns the bytes of a half-precision result in float32 (`native/cpu/ScatterGatherKernel.cpp`)."""
    return elements(result) * _FLOAT_BYTES if result.dtype in HALVES else _ZERO


def _sum_cast(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """Returns the bytes of the input cast to the result's dtype (`native/ReduceOps.cpp`)."""
    operand = arguments[0]
    return elements(operand) * result.dtype.itemsize if operand.dtype != result.dtype else _ZERO


def _mean_cast(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """Returns the bytes of a half-precision input in float32, and of its mean (`native/ReduceOps.cpp`)."""
    operand = arguments[0]
    if operand.dtype not in HALVES:
        return _ZERO
    return (elements(operand) + (elements(result) if result.dtype in HALVES else 0)) * _FLOAT_BYTES


def _attention(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of a block of the attention matrix with its rows' maxima and sums, and its output, per thread
    (`native/cpu/FlashAttentionKernel.cpp`). Packed float16 keys do not count: torch's allocator does not hold them."""
    query, key = arguments[:2]
    rows, block = _blocks(query, key)
    held = block * _accumulated_bytes(query) + rows * (2 + symbolic(query.shape[3])) * _FLOAT_BYTES
    return torch.get_num_threads() * held


def _attention_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of a block of the attention matrix and of its gradient, the sums of its rows, and oneDNN's
    buffers, per thread; plus a copy of the output's gradient if a token's heads are not contiguous."""
    gradient, query, key = arguments[:3]
    rows, block = _blocks(query, key)
    held = 2 * block * _accumulated_bytes(query) + rows * _FLOAT_BYTES
    held += _onednn_buffers(query.dtype, rows, sympy.Min(_KEY_BLOCK, symbolic(key.shape[2])), symbolic(query.shape[3]))
    copied = _ZERO if _is_contiguous(gradient, (0, 2, 1, 3)) else _bytes(gradient)
    return torch.get_num_threads() * held + copied


def _contiguous_copies(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of copies of the first two tensors that are not contiguous: the output's gradient, and the
    output or input (`native/SoftMax.cpp`, `native/layer_norm.cpp`)."""
    copied = (tensor for tensor in arguments[:2] if tensor.device.type == "cpu" and not _is_contiguous(tensor))
    return sympy.Add(*map(_bytes, copied))


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[sympy.Expr, sympy.Expr]:
    """Returns the rows and the elements of a block of the attention matrix."""
    length = symbolic(query.shape[2])
    most = sympy.Piecewise((_LONG, length >= _LONG_FROM), (_MEDIUM, length >= _MEDIUM_FROM), (_SHORT, True))
    rows = sympy.Min(most, length)
    return rows, rows * sympy.Min(_KEY_BLOCK, symbolic(key.shape[2]))


def _onednn_buffers(dtype: torch.dtype, rows: sympy.Expr, keys: sympy.Expr, head: sympy.Expr) -> sympy.Expr:
    """Returns the bytes of oneDNN's buffers for block products with a half-precision result: the gradients of queries,
    keys and values (`mkldnn_bf16_gemm` in `native/CPUBlas.cpp`); 0 if oneDNN does not multiply this dtype.

    With AVX512-BF16: both packed factors, and a part of the result in float32. This is exact if the number of keys in
    a block is at most 256 or even; else oneDNN may cut them into smaller parts, and holds up to 96 KiB less. With
    AVX512 alone: the result in float32, and up to 4 KiB. Compared for 2,850 shapes with each instruction set (torch
    2.13, oneDNN by `ONEDNN_MAX_CPU_ISA`); not measured on processors with AMX.
    """
    if not kernels.onednn_multiplies(dtype):
        return _ZERO
    if not kernels.has_instructions_for(dtype):
        return sympy.Max(keys, rows) * head * _FLOAT_BYTES + _ONEDNN_OVERHEAD
    columns = sympy.Min(_ONEDNN_COLUMNS, head)
    part = sympy.Piecewise((keys, keys <= _LONG), (sympy.ceiling(keys / 2), True))
    padded_rows, padded_keys = (_ONEDNN_ROWS * sympy.ceiling(size / _ONEDNN_ROWS) for size in (rows, keys))
    of_keys = (
        padded_rows * _ONEDNN_COLUMNS * dtype.itemsize
        + part * (padded_rows * dtype.itemsize + columns * _FLOAT_BYTES)
        + _ONEDNN_OVERHEAD
    )
    of_queries = padded_keys * _ONEDNN_COLUMNS * dtype.itemsize + rows * columns * _FLOAT_BYTES + _ONEDNN_OVERHEAD
    return sympy.Max(of_keys, of_queries)


def _accumulated_bytes(query: torch.Tensor) -> int:
    """Returns the bytes of a block's element: in float32, plus a half-precision copy if the query has such a dtype."""
    return _FLOAT_BYTES + (query.dtype.itemsize if query.dtype.itemsize < _FLOAT_BYTES else 0)


def _is_contiguous(tensor: torch.Tensor, order: Sequence[int] = ()) -> bool:
    """Returns True if a tensor is contiguous in this order of dimensions.

    Compares expressions, so that no guard is added on a symbol, and makes no view, since the tensor may belong to a
    fake mode that is not active.

    Args:
        order: order of the dimensions, outermost first; empty: their own.
    """
    step = sympy.Integer(1)
    for dimension in reversed(order or range(tensor.dim())):
        size, stride = symbolic(tensor.shape[dimension]), symbolic(tensor.stride(dimension))
        if size != 1 and stride != step:
            return False
        step *= size
    return True


# Bytes per element of a product that TRL's code for devices without Triton holds in float32 tensors: in the forward;
# in the backward, with a mask; in addition in the backward for entropy gradients, and for a soft cap (`_forward_tile`,
# `_backward_tile` in `trl/kernels/chunked_logprob.py`, 1.16).
_TILE, _TILE_BACKWARD, _TILE_OF_ENTROPY, _TILE_OF_CAP = 12, 29, 4, 4
# Number of sums and maxima per token that are not results.
_VECTORS = 4


def _label_log_probs(arguments: Sequence[Any], by_kernel: bool) -> sympy.Expr:
    """Returns the bytes of a buffer for products of token chunks with vocabulary chunks, and of temporaries."""
    hidden, weight, _, labels, _, chunk, _, _, _, autocast = arguments
    held = _buffer(hidden, weight, chunk, autocast, None if by_kernel else _TILE)
    held += sum(_casts_of_chunks(hidden, weight, chunk, autocast))
    held += _VECTORS * elements(labels) * _FLOAT_BYTES
    return held + (_bytes(hidden) + _bytes(labels) if by_kernel else 0)


def _label_log_probs_backward(arguments: Sequence[Any], by_kernel: bool) -> sympy.Expr:
    """Returns the bytes, beside the gradients, of the highest of three moments.

    1. A product: all gradients in float32, the buffer and temporaries. Each chunk of a cast weight is made while the
       one before it is held.
    2. The end of TRL's function, whose local variables still hold the buffer while the gradients are cast.
    3. With a kernel, which computes the tokens with a label: the gradient of their hidden states is spread over all.
    """
    gradient, of_entropy, hidden, weight, bias, labels, _, _, _, chunk, softcap, _, autocast, needed = arguments
    per_element = _TILE_BACKWARD + _TILE_OF_ENTROPY * (of_entropy is not None) + _TILE_OF_CAP * (softcap is not None)
    of_hidden, of_weight = _casts_of_chunks(hidden, weight, chunk, autocast)
    results = [each for each, is_needed in zip((hidden, weight, bias), needed, strict=True) if is_needed]
    found = sympy.Add(*map(_bytes, results))
    cast = sympy.Add(*(_bytes(each) for each in results if each.dtype != torch.float32))
    accumulated = sympy.Add(*(elements(each) * _FLOAT_BYTES for each in results)) + of_hidden
    words, tokens = weight.shape[0], symbolic(hidden.shape[0])
    last = sympy.Integer((words - 1) % chunk + 1) * of_weight // max(1, min(words, chunk))
    if words >= 2 * chunk:
        before = of_weight
    else:
        # A single chunk of words is cast again for the next chunk of tokens.
        before = last if words > chunk else last * sympy.Min(1, sympy.Max(0, tokens - token_chunk()))
    product = accumulated + of_weight + before
    product += _buffer(hidden, weight, chunk, autocast, None if by_kernel else per_element)
    end = accumulated + last + cast + _buffer(hidden, weight, chunk, autocast, None if by_kernel else 0)
    if not by_kernel:
        return sympy.Max(product, end) - found
    vectors = 2 + (gradient is not None) + (of_entropy is not None)
    # With a label: their hidden states, their labels twice, and vectors. Every token counts as such.
    picked = _bytes(hidden) + 2 * _bytes(labels) + vectors * elements(labels) * _FLOAT_BYTES
    spread = found + (_bytes(hidden) if needed[0] else 0)
    return picked + sympy.Max(product, end, spread) - found


def _product(
    hidden: torch.Tensor, weight: torch.Tensor, chunk: int, autocast: torch.dtype | None
) -> tuple[sympy.Expr, sympy.Expr, torch.dtype]:
    """Returns the tokens and words of one product, and its dtype."""
    tokens, words = sympy.Min(symbolic(hidden.shape[0]), token_chunk()), sympy.Min(symbolic(weight.shape[0]), chunk)
    return tokens, words, hidden.dtype if autocast is None else autocast


def _buffer(
    hidden: torch.Tensor, weight: torch.Tensor, chunk: int, autocast: torch.dtype | None, per_element: int | None
) -> sympy.Expr:
    """Returns the bytes of the buffer and of temporaries.

    Rows of the buffer are longer than a small vocabulary; on a CPU the rest takes no pages.

    Args:
        per_element: bytes of temporaries per element of a product; None: products are processed in place.
    """
    tokens, words, dtype = _product(hidden, weight, chunk, autocast)
    size = dtype.itemsize
    return tokens * (chunk * size if per_element is None else words * (size + per_element))


def _casts_of_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, chunk: int, autocast: torch.dtype | None
) -> tuple[sympy.Expr, sympy.Expr]:
    """Returns the bytes of casts of a chunk of the hidden states, and of one of the weight."""
    tokens, words, dtype = _product(hidden, weight, chunk, autocast)
    of_hidden, of_weight = (
        _ZERO if factor.dtype == dtype else rows * symbolic(factor.shape[1]) * dtype.itemsize
        for rows, factor in ((tokens, hidden), (words, weight))
    )
    return of_hidden, of_weight


def _unreduced_loss(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of the unreduced loss if the result is reduced (`native/BinaryOps.cpp`, `native/Loss.cpp`)."""
    is_reduced = len(arguments) < 3 or arguments[2] != 0
    shape = torch.broadcast_shapes(arguments[0].shape, arguments[1].shape)
    return sympy.Mul(*map(symbolic, shape)) * arguments[0].dtype.itemsize if is_reduced else _ZERO


def _gelu_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of a contiguous copy of the gradient for oneDNN, and of oneDNN's result if the gradient is in
    another order (`native/Activation.cpp`); an upper bound with `approximate="tanh"`, which copies nothing."""
    gradient = arguments[0]
    if _is_contiguous(gradient):
        return _ZERO
    is_expanded = any(symbolic(step) == 0 for step in gradient.stride())
    return _bytes(gradient) * (1 if is_expanded else 2)


def _loss_of_logits(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of binary cross entropy's temporaries, and of the unreduced loss if the result is reduced
    (`native/Loss.cpp`)."""
    is_reduced = len(arguments) < 5 or arguments[4] != 0
    return _bytes(arguments[0]) * (2 if is_reduced else 1)


_LOSSES = dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _unreduced_loss)
_POINTWISE = ("add", "div", "mul", "rsub", "sub", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")
_CPU_RULES_OF_RESULT: dict[str, Callable[[Sequence[Any], Any], sympy.Expr]] = {
    **dict.fromkeys(_POINTWISE, _casts),
    # The condition is not cast.
    "where": lambda arguments, result: _casts(arguments[1:], result),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _accumulated),
    "sum": _sum_cast,
    "mean": _mean_cast,
}
_CPU_RULES: dict[str, Callable[[Sequence[Any]], sympy.Expr]] = {
    **dict.fromkeys(
        ("_log_softmax_backward_data", "_softmax_backward_data", "native_layer_norm_backward"), _contiguous_copies
    ),
    "native_layer_norm": lambda arguments: _contiguous_copies(arguments[:1]),
    "gelu_backward": _gelu_backward,
    "binary_cross_entropy_with_logits": _loss_of_logits,
    **_LOSSES,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "label_log_probs": functools.partial(_label_log_probs, by_kernel=False),
    "label_log_probs_backward": functools.partial(_label_log_probs_backward, by_kernel=False),
}


def _reduction(source: torch.Tensor, options: Sequence[Any], result: Any, device: Multiprocessors) -> sympy.Expr:
    if not source.dim() or not isinstance(result, torch.Tensor):
        return _ZERO
    dims = next((option for option in options if isinstance(option, list | tuple)), None)
    reduced = {dim % source.dim() for dim in dims} if dims else set(range(source.dim()))
    sizes, strides = [symbolic(size) for size in source.shape], [symbolic(step) for step in source.stride()]
    outputs = sympy.Mul(*(size for dim, size in enumerate(sizes) if dim not in reduced))
    inputs = sympy.Mul(*(size for dim, size in enumerate(sizes) if dim in reduced))
    fastest = [dim for dim, step in enumerate(strides) if step == 1 and sizes[dim] != 1]
    along_fastest = not fastest or fastest[-1] in reduced
    # Size of the innermost run of dimensions that are not reduced.
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
    """Bytes of partial results of a reduction whose inputs are split across blocks: `setReduceConfig` and
    `ReduceConfig::global_memory_size` of `cuda/Reduce.cuh`.

    Args:
        outputs: number of results.
        inputs: number of inputs of each result.
        innermost: size of the innermost run of dimensions that are not reduced.
        along_fastest: 1 if the dimension with stride 1 is reduced.
        itemsize: bytes of an accumulated value.
        multiprocessors: number of multiprocessors of the device.
        threads: resident threads per multiprocessor.
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
    # Round down to powers of two.
    width_power, height_power = (min(1 << max(0, size.bit_length() - 1), block_threads) for size in (width, height))
    block_width = min(width_power, _WARP)
    block_height = min(height_power, block_threads // block_width)
    block_width = min(width_power, block_threads // block_height)
    split = block_width if along_fastest else 1
    outputs_per_block = 1 if along_fastest else block_width
    per_thread = _parts(inputs, split)
    is_split_in_block = per_thread >= block_height * 16 or per_thread >= 256
    if is_split_in_block:
        split *= block_height
    else:
        outputs_per_block *= block_height
    per_thread = _parts(inputs, split)
    most_blocks = multiprocessors * (threads // (block_width * block_height))
    grid = _parts(outputs // per_load, outputs_per_block)
    if not is_split_in_block or per_thread < 256 or grid > most_blocks:
        return 0
    blocks_per_output = max(min(_parts(most_blocks, grid), _parts(per_thread, 16)), _parts(per_thread, 256))
    if blocks_per_output <= 1:
        return 0
    partial = outputs * blocks_per_output * (1 if along_fastest else block_width * per_load)
    semaphores = 4 * grid
    return partial * itemsize + semaphores


def _parts(size: int, block: int) -> int:
    return -(-size // block)


def _softmax_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of the gradient times the output (`softmax_backward_cuda` of `cuda/SoftMax.cu`)."""
    return _bytes(arguments[0])


def _embedding_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of sorted indices and of partial sums of rows (`cuda/EmbeddingBackwardKernel.cu`)."""
    gradient, indices, rows = arguments[0], arguments[1], symbolic(arguments[2])
    count = elements(indices)
    segments = sympy.Min(count, rows)
    partials = sympy.floor(count / _ROWS_PER_PARTIAL_SUM) + segments
    bookkeeping = 8 * (3 * count + 2 * segments + partials)
    held = bookkeeping + 4 * partials * symbolic(gradient.shape[-1])
    return sympy.Piecewise((held, count > _SORTED_INDICES), (_ZERO, True))


def _efficient_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of the sums of output times gradient, and of the query's gradient in float32; in half
    precision with heads above 128, also of key and value gradients (`transformers/cuda/mem_eff_attention`)."""
    query, key = arguments[1], arguments[2]
    batch, heads, length, width = map(symbolic, query.shape)
    blocks = sympy.ceiling(length / _BLOCK) * sympy.ceiling(width / _BLOCK)
    held = batch * heads * (blocks * (4 * _BLOCK**2 + _LOCK_BYTES) + 4 * length)
    if query.dtype in HALVES and width > 2 * _BLOCK:
        keys = sympy.ceiling(symbolic(key.shape[2]) / _BLOCK) * _BLOCK
        held += 2 * batch * heads * keys * sympy.ceiling(width / _BLOCK) * _BLOCK * 4
    return held


def _flash_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """Returns the bytes of the query's gradient in float32, the softmax's sums, and copies of output and gradient;
    with fewer key heads than query heads, also key and value gradients of all heads
    (`transformers/cuda/flash_attn/flash_api.cpp`)."""
    query, key = arguments[1], arguments[2]
    batch, heads, length, width = map(symbolic, query.shape)
    rounded = sympy.ceiling(length / 128) * 128
    head = sympy.ceiling(width / 32) * 32
    held = batch * heads * (rounded * (head * 4 + 4) + 2 * length * width * query.dtype.itemsize)
    if symbolic(key.shape[1]) != heads:
        held += 2 * batch * heads * symbolic(key.shape[2]) * width * key.dtype.itemsize
    return held


_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "linalg_vector_norm"})
_CUDA_RULES: dict[str, Callable[[Sequence[Any]], sympy.Expr]] = {
    **_LOSSES,
    "_softmax_backward_data": _softmax_backward,
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "label_log_probs": functools.partial(_label_log_probs, by_kernel=True),
    "label_log_probs_backward": functools.partial(_label_log_probs_backward, by_kernel=True),
    "gemm_4bit": _dequantized,
    "int8_linear": _int8_linear,
    "int8_scaled_mm": _int8_product,
    "int8_vectorwise_quant": _outliers,
}
