"""The work of an operator: bytes moved, floating point operations and kind of kernel. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from optimum_memopt.compat.torch import dtype_name, tensors_in
from optimum_memopt.engines.simulator.own_operators import sizes_of
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.kernels import ALIGNED, HALVES

_ATTENTION = "_scaled_dot_product_"
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# Products with quantized weights, and the shape of the weight from the arguments: bitsandbytes' with 4 and 8 bits, and
# this package's with 8 bits.
_IN_4_BITS = "gemm_4bit"
_QUANTIZED_PRODUCTS: dict[str, Callable[[Sequence[Any]], Sequence[int]]] = {
    _IN_4_BITS: lambda arguments: arguments[2],
    "int8_scaled_mm": lambda arguments: arguments[1].shape,
    "int8_linear": lambda arguments: arguments[1].shape,
}
# Slower than element-wise kernels: several passes over the input, or sums across threads.
_REDUCTIONS = frozenset(
    (
        "_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax", "_log_softmax_backward_data", "_softmax",
        "_softmax_backward_data", "amax", "mean", "native_layer_norm", "native_layer_norm_backward", "sum", "var_mean",
    )
)  # fmt: skip
# Operators that do not read all of one operand: its position, and whether they read as many bytes of it as they return
# (or none).
_LOOKUPS = {
    "embedding": (0, True),
    "gather": (0, True),
    "index_select": (0, True),
    "nll_loss_forward": (0, True),
    "nll_loss_backward": (1, False),
}
# ATen's matrix products.
MATRIX_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "mm"})
# float32 products run without tensor cores, in tiles: dimensions are padded to the first number. Below the second one,
# vector kernels are used.
_TILE, _VECTORS = 64, 8


class Kernel(Enum):
    """Kinds of kernels, each of which reaches a different fraction of a device's rates (`Attained.share`)."""

    MOVING = "moves operands"
    FUSED = "computes what several operators do, compiled by inductor"
    CONVERTING = "moves operands of several floating dtypes, or widens one"
    REDUCING = "sums along rows or columns"
    PRODUCT = "multiplies matrices, or convolves"
    UNALIGNED = "multiplies matrices in half precision whose rows are no multiple of 16 bytes"
    ATTENTION = "attends"


@dataclass(frozen=True)
class Work:
    """The work of one operator.

    Attributes:
        key: text that is equal for operators that do the same work on the same shapes.
        bytes: bytes read and written.
        flops: floating point operations of matrix products, convolutions and attention, else 0. Causal attention
            counts half; float32 products count whole tiles.
        dtype: the dtype that it computes in.
        is_several: it runs several kernels, one after the other.
        is_launched: a kernel is launched for it: its own, or a fused one whose result it computes.
        by_python: it is called from a module; False: from autograd's engine.
    """

    key: str
    bytes: float
    flops: float
    dtype: str
    kernel: Kernel = Kernel.MOVING
    is_several: bool = False
    is_launched: bool = True
    by_python: bool = True

    @property
    def operator(self) -> str:
        """Returns the operator's name: `aten.mm.default`."""
        return self.key.partition("(")[0]


def work_between(low: Sequence[Work], high: Sequence[Work], share: float) -> tuple[Work, ...] | None:
    """Returns work interpolated between two batches; None if they run different operators.

    Args:
        share: 0 for `low`, 1 for `high`; below 0 and above 1 it extrapolates.
    """
    if [work.operator for work in low] != [work.operator for work in high]:
        return None
    return tuple(
        replace(
            one,
            bytes=max(0.0, one.bytes + share * (other.bytes - one.bytes)),
            flops=max(0.0, one.flops + share * (other.flops - one.flops)),
        )
        for one, other in zip(low, high, strict=True)
    )


def work_of(
    operator: Any, positional: Sequence[Any], named: Mapping[str, Any], result: Any, device: torch.device | None
) -> Work:
    """Returns the work of a call of an operator, whose tensors need no data.

    Args:
        device: the device to run on, which may differ from the tensors'.
    """
    operands = _tensors([*positional, *named.values()])
    texts = [
        f"{leaf.dtype}{list(leaf.shape)}{list(leaf.stride())}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in dynamo.tree_leaves((positional, list(named.items())))
    ]
    results = _tensors(result)
    moved = sum(tensor.nbytes for tensor in (*operands, *results))
    name = dynamo.operator_name(operator)
    if (sizes := sizes_of(operator)) is not None:
        own = sizes(positional, device is not None and device.type == "cuda")
        flops, dtype, kernel = float(own.flops), dtype_name(own.compute), Kernel.PRODUCT
        moved += int(own.moved)
    else:
        flops = _flops(operator, positional, named, result)
        kernel = _kernel(name, flops, operands, results)
        # The largest operand's dtype, not that of a mask or an index.
        largest = max(operands, key=lambda operand: operand.nbytes, default=None)
        if (weight_shape := _QUANTIZED_PRODUCTS.get(name)) is not None:
            largest = results[0]
            if name == _IN_4_BITS:
                # It writes and reads the weight in the input's dtype.
                moved += 2 * math.prod(weight_shape(positional)) * largest.dtype.itemsize
            else:
                # It writes and reads the input's codes, and the sums in int32.
                moved += 2 * (positional[0].numel() + largest.numel() * torch.int32.itemsize)
        if (lookup := _LOOKUPS.get(name)) is not None:
            place, reads = lookup
            moved += (sum(tensor.nbytes for tensor in results) if reads else 0) - positional[place].nbytes
        dtype = "" if largest is None else dtype_name(largest.dtype)
    return Work(
        key=f"{operator}({', '.join(texts)}) on {device}",
        bytes=moved,
        flops=flops,
        dtype=dtype,
        kernel=kernel,
        is_several=sizes is not None,
    )


def _kernel(name: str, flops: float, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Kernel:
    if name.startswith(_ATTENTION) and flops:
        return Kernel.ATTENTION
    if flops:
        matrices = [tensor for tensor in (*operands, *results) if name in MATRIX_PRODUCTS and tensor.dim() > 1]
        is_half = bool(matrices) and all(tensor.dtype in HALVES for tensor in matrices)
        rows = (stride for tensor in matrices for stride in tensor.stride()[-2:] if stride > 1)
        return Kernel.UNALIGNED if is_half and any(row % ALIGNED for row in rows) else Kernel.PRODUCT
    if name in _REDUCTIONS:
        return Kernel.REDUCING
    floating = {tensor.dtype for tensor in operands if tensor.dtype.is_floating_point}
    widens = any(result.dtype.itemsize > dtype.itemsize for result in results for dtype in floating)
    is_copy = name in ("_to_copy", "copy_", "copy", "convert_element_type")
    return Kernel.CONVERTING if len(floating) > 1 or (is_copy and widens) else Kernel.MOVING


def _flops(operator: Any, positional: Sequence[Any], named: Mapping[str, Any], result: Any) -> float:
    name, share = dynamo.operator_name(operator), 1.0
    if (weight_shape := _QUANTIZED_PRODUCTS.get(name)) is not None:
        return float(2 * positional[0].numel() * weight_shape(positional)[0])
    count = flop_registry.get(getattr(operator, "overloadpacket", None))
    if name.startswith(_ATTENTION):
        # The first operand of its backward is the gradient.
        is_backward = name.endswith("backward")
        shapes = _with_all_heads([operand.shape for operand in positional[: 4 if is_backward else 3]])
        if count is None and name.startswith(_CPU_ATTENTION):
            # The operator is missing in the registry.
            return float((sdpa_backward_flop_count if is_backward else sdpa_flop_count)(*shapes))
        share = 0.5 if fx_graph.arguments_by_name(operator, positional, named).get("is_causal") else 1.0
        positional = (*shapes, *positional[len(shapes) :])
    elif name in MATRIX_PRODUCTS and result.dtype == torch.float32:
        *_, left, right = (operand for operand in positional if isinstance(operand, torch.Tensor))
        share = max(1.0, _TILE / max(_VECTORS, min(*left.shape[-2:], right.shape[-1])))
    if count is None:
        return 0.0
    with fx_graph.without_modes_and_autocast():
        return share * float(count(*positional, **named, out_val=result))


def _with_all_heads(shapes: Sequence[torch.Size]) -> list[torch.Size]:
    """Returns the shapes of attention's operands with as many key and value heads as query heads, as the FLOP formula
    requires: it accepts fewer only since torch 2.12 (`torch/utils/flop_counter.py`)."""
    heads = shapes[-3][1]
    return [*shapes[:-2], *(torch.Size((shape[0], heads, *shape[2:])) for shape in shapes[-2:])]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return list(tensors_in(tree))
