"""What PyTorch's CPU operators hold while they run beside their results, in bytes.

From torch's sources (2.13, `aten/src/ATen/`), and compared with the allocator by
`tests/unit/test_cpu_workspaces.py`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from optimum_memopt.engines.compile.graph.joint import elements, symbolic
from optimum_memopt.engines.compile.torch_compat import kernels

_ZERO = sympy.Integer(0)
_FLOAT_BYTES = 4
# Columns of a block of the attention matrix; of its rows, how many from which length on.
_KEY_BLOCK = 512
_SHORT, _MEDIUM, _LONG = 32, 64, 256
_MEDIUM_FROM, _LONG_FROM = 192, 768
# oneDNN packs a factor in blocks of 32 rows and 64 columns; its tables take 1,152 bytes, the scale of a product 4.
_ONEDNN_ROWS, _ONEDNN_COLUMNS = 32, 64
_ONEDNN_OVERHEAD = 1152 + 4


def workspace(name: str, arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """Of a call of an ATen operator.

    Args:
        name: without namespace and overload.
        arguments: positional ones; tensors may be fake.
        result: of the call.
    """
    if (rule_of_result := _RULES_OF_RESULT.get(name)) is not None:
        is_on_cpu = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        return rule_of_result(arguments, result) if is_on_cpu else _ZERO
    rule = _RULES.get(name)
    return rule(arguments) if rule is not None else _ZERO


def _casts(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """Operands of another dtype, which an operator casts before it computes (`native/TensorIterator.cpp`; on other
    devices the kernel casts each element)."""
    operands = [operand for operand in arguments if isinstance(operand, torch.Tensor) and operand.dim()]
    dtype = result.dtype
    if dtype == torch.bool and operands:
        # A comparison computes in what its operands are promoted to.
        dtype = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    return sympy.Add(*(elements(operand) for operand in operands if operand.dtype != dtype)) * dtype.itemsize


def _choice_casts(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """The same of `where`, without its condition."""
    return _casts(arguments[1:], result)


def _accumulated(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """A half-precision result in float32 (`native/cpu/ScatterGatherKernel.cpp`)."""
    return elements(result) * _FLOAT_BYTES if result.dtype in _HALVES else _ZERO


def _sum_cast(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """The input in the result's dtype (`native/ReduceOps.cpp`)."""
    operand = arguments[0]
    return elements(operand) * result.dtype.itemsize if operand.dtype != result.dtype else _ZERO


def _mean_cast(arguments: Sequence[Any], result: Any) -> sympy.Expr:
    """A half-precision input in float32, and its mean (`native/ReduceOps.cpp`)."""
    operand = arguments[0]
    if operand.dtype not in _HALVES:
        return _ZERO
    return (elements(operand) + (elements(result) if result.dtype in _HALVES else 0)) * _FLOAT_BYTES


def _attention(arguments: Sequence[Any]) -> sympy.Expr:
    """A block of the attention matrix with the maxima and sums of its rows, and its output, for each thread
    (`native/cpu/FlashAttentionKernel.cpp`). Without the packed keys of float16, which are not torch's allocator's."""
    query, key = arguments[:2]
    rows, block = _blocks(query, key)
    held = block * _accumulated_bytes(query) + rows * (2 + symbolic(query.shape[3])) * _FLOAT_BYTES
    return torch.get_num_threads() * held


def _attention_backward(arguments: Sequence[Any]) -> sympy.Expr:
    """A block of the attention matrix and of its gradient, a sum for each of its rows, and what oneDNN multiplies
    blocks with, for each thread; the output's gradient, where each token's heads do not lie one after the other."""
    gradient, query, key = arguments[:3]
    rows, block = _blocks(query, key)
    held = 2 * block * _accumulated_bytes(query) + rows * _FLOAT_BYTES
    held += _onednn_buffers(query.dtype, rows, sympy.Min(_KEY_BLOCK, symbolic(key.shape[2])), symbolic(query.shape[3]))
    copied = _ZERO if _is_contiguous(gradient.transpose(1, 2)) else elements(gradient) * gradient.dtype.itemsize
    return torch.get_num_threads() * held + copied


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[sympy.Expr, sympy.Expr]:
    """Rows and elements of a block of the attention matrix."""
    length = symbolic(query.shape[2])
    most = sympy.Piecewise((_LONG, length >= _LONG_FROM), (_MEDIUM, length >= _MEDIUM_FROM), (_SHORT, True))
    rows = sympy.Min(most, length)
    return rows, rows * sympy.Min(_KEY_BLOCK, symbolic(key.shape[2]))


def _onednn_buffers(dtype: torch.dtype, rows: sympy.Expr, keys: sympy.Expr, head: sympy.Expr) -> sympy.Expr:
    """Buffers of oneDNN's products of blocks whose result is in half precision: the gradients of queries, keys and
    values (`mkldnn_bf16_gemm` in `native/CPUBlas.cpp`). 0 where oneDNN does not multiply this dtype.

    With AVX512-BF16: both factors, packed, and a part of the result in float32. Exact where the keys of a block are at
    most 256 or even in number; elsewhere oneDNN may cut them into smaller parts, and holds up to 96 KiB less. With
    AVX512 alone: the result in float32 and up to 4 KiB. Compared for 2,850 shapes with each (torch 2.13, oneDNN by
    `ONEDNN_MAX_CPU_ISA`); on processors with AMX not seen.
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
    """Of an element of a block: in float32, and a copy in half precision where the query has it."""
    return _FLOAT_BYTES + (query.dtype.itemsize if query.dtype.itemsize < _FLOAT_BYTES else 0)


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """Asked of expressions, so that a symbol gets no guard."""
    step = sympy.Integer(1)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if symbolic(size) != 1 and symbolic(stride) != step:
            return False
        step *= symbolic(size)
    return True


_HALVES = frozenset({torch.bfloat16, torch.float16})
_POINTWISE = ("add", "div", "mul", "rsub", "sub", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")
_RULES_OF_RESULT: dict[str, Callable[[Sequence[Any], Any], sympy.Expr]] = {
    **dict.fromkeys(_POINTWISE, _casts),
    "where": _choice_casts,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _accumulated),
    "sum": _sum_cast,
    "mean": _mean_cast,
}
_RULES: dict[str, Callable[[Sequence[Any]], sympy.Expr]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
