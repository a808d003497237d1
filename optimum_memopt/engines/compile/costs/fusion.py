"""The bytes that the kernels of a compiled joint graph move, which inductor fuses from neighbouring operators. Pure.

A kernel reads operands from other kernels and writes results that other kernels read. After
`torch/_inductor/scheduler.py` (2.13), far simpler: elementwise operators, and sums over the last dimensions, are in
one kernel if no other kind of operator is on a path between them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    first_input,
    is_output,
    is_tensor,
    is_view,
    root,
    tensor_value,
)
from optimum_memopt.engines.torch_compat import dynamo

# Reductions over rows of at least this many elements do not find in a cache what they have read before.
_LONG_ROW = 2**14
_REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "prod", "any", "all", "argmax", "argmin")
)
# Elementwise operators without torch's tag `pointwise`.
_BY_ELEMENT = frozenset(
    (
        "arange", "cat", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "full", "full_like",
        "gather", "index", "inductor_lookup_seed", "inductor_random", "inductor_seed", "inductor_seeds", "iota",
        "masked_fill", "ones_like", "scalar_tensor", "slice_scatter", "where", "zeros", "zeros_like",
    )
)  # fmt: skip
# Operators that read as many bytes of their first operand as they return.
_LOOKUPS = frozenset(("embedding", "gather", "index"))


@dataclass(frozen=True)
class Moved:
    """The operands and results that an operator's part of a kernel moves.

    Attributes:
        reads: the operands that it reads from memory.
        looks_up: it reads as many bytes of the first operand as it returns.
        writes: it writes the result, since another kernel reads it.
    """

    reads: tuple[fx.Node, ...]
    looks_up: bool
    writes: bool


def moved_by(joint: JointGraph) -> dict[fx.Node, Moved]:
    """Returns the operands and results that kernels move, by operator; operators that are not fused have no entry."""
    kernels = _Kernels(joint)
    returned = {root(node) for node in joint.outputs if isinstance(node, fx.Node)}
    moved: dict[fx.Node, Moved] = {}
    # The storages that each kernel has read.
    known: set[tuple[fx.Node, fx.Node]] = set()
    for node in kernels.fused:
        reads = []
        for read in _operands(node):
            source = _operator_of(root(read))
            # The backward recomputes what the forward has not written: saving it would take longer.
            is_again = kernels.is_passed(source, node) and source in moved and not moved[source].writes
            own = kernels.of(node), root(read)
            if own not in known and (_reads_again(node) or not (is_again or kernels.is_within(source, node))):
                known.add(own)
                reads.append(read)
        results = _results(node)
        is_returned = not returned.isdisjoint(results)
        users = [user for result in results for user in readers(result)]
        writes = is_returned or not all(
            kernels.is_within(node, user) or (user in kernels.fused and kernels.is_passed(node, user))
            for user in users
        )
        looks_up = dynamo.operator_name(node.target) in _LOOKUPS and first_input(node) in reads
        moved[node] = Moved(tuple(reads), looks_up, writes)
    return moved


class _Kernels:
    """The operators of a joint graph, grouped by kernel.

    Attributes:
        fused: operators that may share a kernel, in graph order.
    """

    def __init__(self, joint: JointGraph) -> None:
        # Imported here, since it takes half a second and only graphs with a compiler need it.
        from scipy.cluster.hierarchy import DisjointSet

        self._backward = joint.backward
        self.fused = dict.fromkeys(node for node in joint.nodes if is_fused(node))
        self._stages = self._count(joint)
        self._sets = DisjointSet(self.fused)
        for node in self.fused:
            for source in (_operator_of(root(read)) for read in _operands(node)):
                if self.is_within(source, node):
                    self._sets.merge(source, node)

    def of(self, node: fx.Node) -> fx.Node:
        """Returns the operator that represents a node's kernel."""
        return cast(fx.Node, self._sets[node])

    def is_within(self, source: fx.Node, reader: fx.Node) -> bool:
        """True if both are in one kernel."""
        return {source, reader} <= self.fused.keys() and self._stages[source] == self._stages[reader]

    def is_passed(self, source: fx.Node, reader: fx.Node) -> bool:
        """True if an operator of the backward reads a result of the forward."""
        return reader in self._backward and source not in self._backward

    def _count(self, joint: JointGraph) -> dict[fx.Node, tuple[bool, int]]:
        """Returns each operator's pass and stage: the number of times that a fused operator follows another kind on
        the longest path to it in its pass. A fused operator with later readers only gets the stage of the first."""
        stages: dict[fx.Node, tuple[bool, int]] = {}
        for node in joint.nodes:
            is_backward = node in self._backward
            before = (_operator_of(root(read)) for read in _operands(node))
            own = [
                stages[source][1] + (node in self.fused and source not in self.fused)
                for source in before
                if source in stages and stages[source][0] == is_backward
            ]
            stages[node] = is_backward, max(own, default=0)
        for node in reversed(self.fused):
            users = {user for result in _results(node) for user in readers(result)}
            if users and users <= self.fused.keys():
                stages[node] = max(stages[node], min(stages[user] for user in users))
        return stages


def is_fused(node: fx.Node) -> bool:
    """True for an operator that inductor may fuse with others in one kernel."""
    name = dynamo.operator_name(node.target)
    if node.op != "call_function" or not name or is_view(node):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name in _BY_ELEMENT or name in _REDUCTIONS


def _reads_again(node: fx.Node) -> bool:
    """True for reductions over other than the last dimensions, which have a kernel of their own, or over long rows."""
    if dynamo.operator_name(node.target) not in _REDUCTIONS:
        return False
    shape = tensor_value(first_input(node)).shape
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    given: Sequence[Any] = dims if isinstance(dims, tuple | list) else [] if dims is None else [dims]
    summed = {int(dim) % max(1, len(shape)) for dim in given} or set(range(len(shape)))
    is_last = all(dim in summed for dim in range(min(summed, default=0), len(shape)))
    rows = [int(shape[dim]) for dim in summed if isinstance(shape[dim], int)]
    return not is_last or math.prod(rows) >= _LONG_ROW


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the tensors that an operator reads."""
    return filter(is_tensor, node.all_input_nodes)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operators that read a node, also through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        elif user.op == "call_function":
            yield user


def _results(node: fx.Node) -> list[fx.Node]:
    """Returns the picked outputs of an operator, or the operator itself if it has one output."""
    return [user for user in node.users if _operator_of(user) is node] or [node]


def _operator_of(node: fx.Node) -> fx.Node:
    """Returns the operator that a node is an output of."""
    return first_input(node) if is_output(node) and not is_view(node) else node
