"""The bytes that the kernels of a compiled joint graph move, where inductor computes neighbours in one. Pure.

A kernel reads what no operator of its own computes and writes what others read. After `torch/_inductor/scheduler.py`
(2.13), far simpler: operators that compute by element, and sums over the last dimensions, are in one kernel as long as
no other kind of operator is on a path between them.
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
from optimum_memopt.engines.compile.torch_compat import dynamo

# Sums over so many elements a row find in no cache what they have read before.
_LONG_ROW = 2**14
_REDUCTIONS = frozenset(
    ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "prod", "any", "all", "argmax", "argmin")
)
# Without torch's tag, and computed by element all the same.
_BY_ELEMENT = frozenset(
    (
        "arange", "cat", "clone", "constant_pad_nd", "convert_element_type", "copy", "embedding", "full", "full_like",
        "gather", "index", "inductor_lookup_seed", "inductor_random", "inductor_seed", "inductor_seeds", "iota",
        "masked_fill", "ones_like", "scalar_tensor", "slice_scatter", "where", "zeros", "zeros_like",
    )
)  # fmt: skip
# Of their first operand they read as much as they return.
_LOOKUPS = frozenset(("embedding", "gather", "index"))


@dataclass(frozen=True)
class Moved:
    """The operands and results that an operator's part of a kernel moves.

    Attributes:
        reads: operands.
        looks_up: of the first operand as much is read as the operator returns.
        writes: another kernel reads the result.
    """

    reads: tuple[fx.Node, ...]
    looks_up: bool
    writes: bool


def moved_by(joint: JointGraph) -> dict[fx.Node, Moved]:
    """The operands and results that kernels move, by operator; one that is in no kernel with others has no entry."""
    kernels = _Kernels(joint)
    returned = {root(node) for node in joint.outputs if isinstance(node, fx.Node)}
    moved: dict[fx.Node, Moved] = {}
    # What each kernel has read.
    known: set[tuple[fx.Node, fx.Node]] = set()
    for node in kernels.fused:
        reads = []
        for read in _operands(node):
            source = _operator_of(root(read))
            # What the forward has not written, the backward computes again: saving it would take longer.
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
    """The operators of a joint graph, by the kernel that computes them.

    Attributes:
        fused: those that a kernel may have several of, in the order of the graph.
    """

    def __init__(self, joint: JointGraph) -> None:
        # Half a second of imports, for the graphs of compilers alone.
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
        """The operator that stands for all in a kernel."""
        return cast(fx.Node, self._sets[node])

    def is_within(self, source: fx.Node, reader: fx.Node) -> bool:
        """True where one kernel has both."""
        return {source, reader} <= self.fused.keys() and self._stages[source] == self._stages[reader]

    def is_passed(self, source: fx.Node, reader: fx.Node) -> bool:
        """True where a backward reads what is the forward's."""
        return reader in self._backward and source not in self._backward

    def _count(self, joint: JointGraph) -> dict[fx.Node, tuple[bool, int]]:
        """For each operator in forward or backward how many times those of other kinds are before it on the longest
        path; one that only later ones read is computed with the first of these."""
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
    """True for an operator that one kernel computes together with others."""
    name = dynamo.operator_name(node.target)
    if node.op != "call_function" or not name or is_view(node):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name in _BY_ELEMENT or name in _REDUCTIONS


def _reads_again(node: fx.Node) -> bool:
    """True for sums over other dimensions than the last ones, which have a kernel of their own, and over long rows."""
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
    """The tensors that an operator reads."""
    return filter(is_tensor, node.all_input_nodes)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operators that read a node, through views too."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        elif user.op == "call_function":
            yield user


def _results(node: fx.Node) -> list[fx.Node]:
    """The outputs of an operator, of which several are picked."""
    return [user for user in node.users if _operator_of(user) is node] or [node]


def _operator_of(node: fx.Node) -> fx.Node:
    """The operator that a node is an output of."""
    return first_input(node) if is_output(node) and not is_view(node) else node
