"""The work of an operator, from a joint graph's node or a live call: bytes moved, floating point operations and kind
of kernel. Pure.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.engines.compile.costs.fusion import Moved
from optimum_memopt.engines.compile.graph.joint import (
    MATRIX_PRODUCTS,
    JointGraph,
    first_input,
    is_accumulation,
    is_chunked_loss_operator,
    is_number,
    is_view,
    root,
    storage_bytes,
    symbolic,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.loss.operator import loss_shape
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.kernels import ALIGNED, HALVES

_ATTENTION = "_scaled_dot_product_"
_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
# bitsandbytes' product with a 4-bit weight.
_QUANTIZED_PRODUCT = "gemm_4bit"
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
# float32 products run without tensor cores, in tiles: dimensions are padded to the first number. Below the second one,
# vector kernels are used.
_TILE, _VECTORS = 64, 8
# Returns the value of a number that may be symbolic.
Evaluate = Callable[[Any], Any]
# Returns a tensor of the given shape, strides, dtype and device.
MakeTensor = Callable[[Sequence[int], Sequence[int], torch.dtype, torch.device], torch.Tensor]


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


def works(
    joint: JointGraph,
    sizes: Mapping[sympy.Symbol, int],
    moved: Mapping[fx.Node, Moved] | None = None,
    device: torch.device | None = None,
) -> tuple[Work | None, ...]:
    """Returns the work of each node of a joint graph, in order; None for views, picks of outputs and numbers.

    Args:
        moved: operands and results moved by operators that a compiler fuses, see `moved_by`; None: it fuses none.
        device: the device to plan for; None: the tensors' own.
    """
    number = numbers(sizes)

    def size(tensor: torch.Tensor) -> int:
        return int(math.prod(map(number, tensor.shape))) * tensor.dtype.itemsize

    def work(node: fx.Node) -> Work:
        alone = work_of_node(node, number, device)
        if moved is None:
            return alone
        if (own := moved.get(node)) is None:
            # inductor pads operands (`torch/_inductor/fx_passes/pad_mm.py`).
            return replace(alone, kernel=Kernel.PRODUCT) if alone.kernel is Kernel.UNALIGNED else alone
        result = sum(map(size, _tensors(value(node))))
        # At most the storage of an expanded tensor is read.
        reads = {read: min(size(tensor_value(read)), number(storage_bytes(root(read)))) for read in own.reads}
        if own.looks_up:
            reads[first_input(node)] = result
        moves = sum(reads.values()) + (result if own.writes else 0)
        return replace(alone, bytes=moves, is_launched=own.writes, kernel=Kernel.FUSED)

    def runs(node: fx.Node) -> bool:
        has_schema = getattr(node.target, "_schema", None) is not None
        # Gradient accumulation is timed once for the whole step (`UpdateTimes`).
        is_counted = has_schema and not is_accumulation(node)
        return node.op == "call_function" and is_counted and not is_view(node) and not is_number(node)

    return tuple(work(node) if runs(node) else None for node in joint.nodes)


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


def work_of_node(node: fx.Node, number: Evaluate, device: torch.device | None = None) -> Work:
    """Returns the work of one node of a joint graph, see `works`."""
    with fx_graph.without_modes_and_autocast():
        positional, named = arguments(node, number, _without_data)
        result = concrete(node, number, _without_data)
    there = next((tensor.device for tensor in _tensors(value(node))), None)
    return work_of(node.target, positional, named, result, device or there)


def work_of(
    operator: Any, positional: Sequence[Any], named: Mapping[str, Any], result: Any, device: torch.device | None
) -> Work:
    """Returns the work of an operator call, from a graph's node or a live call; tensors need no data.

    Args:
        device: the device to run on, which may differ from the tensors'.
    """
    flops = _flops(operator, positional, named, result)
    operands = _tensors([*positional, *named.values()])
    texts = [
        f"{leaf.dtype}{list(leaf.shape)}{list(leaf.stride())}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in dynamo.tree_leaves((positional, list(named.items())))
    ]
    results = _tensors(result)
    moved = sum(tensor.nbytes for tensor in (*operands, *results))
    name = dynamo.operator_name(operator)
    if is_loss := is_chunked_loss_operator(operator):
        dtype = positional[-3]
        moved += int(loss_shape(positional, device is not None and device.type == "cuda").moved)
    else:
        # The largest operand's dtype, not that of a mask or an index.
        dtype = max(operands, key=lambda operand: operand.nbytes).dtype if operands else ""
        if name == _QUANTIZED_PRODUCT:
            # It writes and reads the weight in the input's dtype.
            dtype = positional[0].dtype
            moved += 2 * math.prod(positional[2]) * dtype.itemsize
        if (lookup := _LOOKUPS.get(name)) is not None:
            place, reads = lookup
            moved += (sum(tensor.nbytes for tensor in results) if reads else 0) - positional[place].nbytes
    return Work(
        key=f"{operator}({', '.join(texts)}) on {device}",
        bytes=moved,
        flops=flops,
        dtype=str(dtype).removeprefix("torch."),
        kernel=Kernel.PRODUCT if is_loss else _kernel(name, flops, operands, results),
        is_several=is_loss,
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
    if is_chunked_loss_operator(operator):
        hidden, weight, needs = positional[0], positional[1], positional[-1]
        return float(2 * hidden.numel() * len(weight) * (1 + needs[0] + needs[1]))
    name, share = dynamo.operator_name(operator), 1.0
    if name == _QUANTIZED_PRODUCT:
        return float(2 * positional[0].numel() * positional[2][0])
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


def numbers(sizes: Mapping[sympy.Symbol, int]) -> Evaluate:
    """Returns a function that evaluates symbolic numbers; each expression, of which a graph has few, is computed
    once."""

    @cache
    def computed(expression: sympy.Expr) -> int:
        return int(expression.subs(sizes))

    def number_of(number: Any) -> Any:
        if isinstance(number, int | float):
            return number
        return computed(number if isinstance(number, sympy.Expr) else symbolic(number))

    return number_of


def concrete(given: Any, number: Evaluate, make: MakeTensor) -> Any:
    """Returns a node's argument or value with symbols evaluated and tensors replaced by
    `make(shape, stride, dtype, device)`."""
    given = value(given) if isinstance(given, fx.Node) else given
    if isinstance(given, torch.Tensor):
        return make(list(map(number, given.shape)), list(map(number, given.stride())), given.dtype, given.device)
    if isinstance(given, dynamo.SymbolicNumber):
        return number(given)
    return [concrete(item, number, make) for item in given] if isinstance(given, tuple | list) else given


def arguments(node: fx.Node, number: Evaluate, make: MakeTensor) -> tuple[list[Any], dict[str, Any]]:
    positional = [concrete(argument, number, make) for argument in node.args]
    return positional, {name: concrete(argument, number, make) for name, argument in node.kwargs.items()}


def _without_data(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
