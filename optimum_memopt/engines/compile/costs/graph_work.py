"""The work of a joint graph's nodes, with its symbols evaluated. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.engines.compile.costs.fusion import Moved
from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    first_input,
    is_accumulation,
    is_number,
    is_view,
    root,
    storage_bytes,
    tensor_value,
    value,
)
from optimum_memopt.engines.simulator.work import Kernel, Work, work_of
from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.traced_sizes import symbolic

# Returns the value of a number that may be symbolic.
Evaluate = Callable[[Any], Any]
# Returns a tensor of the given shape, strides, dtype and device.
MakeTensor = Callable[[Sequence[int], Sequence[int], torch.dtype, torch.device], torch.Tensor]


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
        result = sum(map(size, tensors_in(value(node))))
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


def work_of_node(node: fx.Node, number: Evaluate, device: torch.device | None = None) -> Work:
    """Returns the work of one node of a joint graph, see `works`."""
    with fx_graph.without_modes_and_autocast():
        positional, named = arguments(node, number, _without_data)
        result = concrete(node, number, _without_data)
    there = next((tensor.device for tensor in tensors_in(value(node))), None)
    return work_of(node.target, positional, named, result, device or there)


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
