"""The forward in blocks that can be planned alone: transformer layers, and what stands before, between and after them.

Pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem


@dataclass(frozen=True)
class Block:
    """Operators of the forward.

    Attributes:
        layer: its path, "" for what is in none.
        nodes: in order, numbers left out.
    """

    layer: str
    nodes: tuple[int, ...]

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.nodes)

    @cached_property
    def places(self) -> dict[int, int]:
        """Where each node stands in the block."""
        return {node: place for place, node in enumerate(self.nodes)}


@dataclass(frozen=True)
class Blocks:
    """All blocks of a problem, in the order of the forward.

    Attributes:
        all: each operator of the forward is in one.
        leaving: roots that are read outside of their block. Whatever reads them finds them saved, so that a block can
            be recomputed from them alone.
        classes: for each block the first one with the same operators on the same sizes.
    """

    problem: Problem
    all: tuple[Block, ...]
    leaving: frozenset[int]
    classes: tuple[int, ...]

    @property
    def representatives(self) -> tuple[int, ...]:
        """One block of each class: the middle one, whose neighbours are most like those of the others."""
        members: dict[int, list[int]] = {}
        for index, first in enumerate(self.classes):
            members.setdefault(first, []).append(index)
        return tuple(found[len(found) // 2] for found in members.values())

    def translated(self, nodes: Collection[int], source: int, target: int) -> frozenset[int]:
        """The nodes of the block `target` that stand where `nodes` stand in `source`, a block of the same class."""
        places = self.all[source].places
        return frozenset(self.all[target].nodes[places[node]] for node in nodes)

    @cached_property
    def index(self) -> dict[int, int]:
        """The block of each node of the forward, numbers left out."""
        return {node: index for index, block in enumerate(self.all) for node in block.nodes}

    @cached_property
    def index_table(self) -> np.ndarray:
        """`index` by node, -1 for those that are in no block."""
        return np.array([self.index.get(node, -1) for node in range(len(self.problem.names))], dtype=np.intp)

    @cached_property
    def layer_table(self) -> np.ndarray:
        """By node, backward's too, the block of its layer; -1 for those in no layer and for views, which may be read
        in many layers and compute nothing in any."""
        layers = {block.layer: index for index, block in enumerate(self.all) if block.layer}
        pairs = zip(self.problem.layers, self.problem.is_view, strict=True)
        return np.array([-1 if is_view else layers.get(layer, -1) for layer, is_view in pairs], dtype=np.intp)

    @cached_property
    def reads(self) -> frozenset[int]:
        return frozenset(self.problem.backward_reads)


def blocks_of(problem: Problem) -> Blocks:
    """The blocks of a problem."""
    groups: dict[tuple[str, str], list[int]] = {}
    layer = ""
    for node, is_forward in enumerate(problem.is_forward):
        if not is_forward or problem.is_number[node]:
            continue
        own = problem.layers[node]
        layer = own or layer
        groups.setdefault((own, layer), []).append(node)
    found = tuple(Block(own, tuple(nodes)) for (own, _), nodes in groups.items())
    block_of = {node: index for index, block in enumerate(found) for node in block.nodes}
    leaving = {
        problem.roots[read]
        for node in block_of
        if not problem.is_view[node]
        for read in problem.reads[node]
        if problem.roots[read] in block_of and block_of[problem.roots[read]] != block_of[node]
    }
    tensors = frozenset(root for root in leaving if problem.is_tensor[root])
    return Blocks(problem, found, tensors, _classes(problem, found, tensors))


def _classes(problem: Problem, blocks: Sequence[Block], leaving: frozenset[int]) -> tuple[int, ...]:
    reads = frozenset(problem.backward_reads)
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(_signature(problem, block, leaving, reads), index) for index, block in enumerate(blocks)
    )


def _signature(problem: Problem, block: Block, leaving: frozenset[int], reads: frozenset[int]) -> object:
    """Equal for blocks that can have the same plans."""
    return tuple(
        (
            problem.kinds[node],
            problem.bytes[node],
            problem.workspaces[node],
            node in leaving,
            node in reads,
            # Of other blocks only how many.
            tuple(block.places.get(read, -1) for read in problem.reads[node] if not problem.is_number[read]),
        )
        for node in block.nodes
    )
