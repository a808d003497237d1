"""Splits the forward into blocks that can be planned alone (transformer layers, and the operators between them), and
finds what each may save at every price of a byte.

Choosing to recompute an operator or to save its result is a minimum cut, whose linear program has integral solutions.
Pure.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.solver.cut import LOWEST_PRICE, MEGA, Cut, cut_of

# Maximum number of points of the convex hull of (bytes, seconds), and of points between its corners.
_HULL, _BETWEEN = 24, 16
# Price in microseconds per megabyte at which everything is recomputed that can be.
_HIGHEST = 1e6
# Maps a run's number to the sets of nodes that plans for this run alone save.
PlansOfRun = Callable[[int], Iterable[frozenset[int]]]


@dataclass(frozen=True)
class Block:
    """Nodes of the forward in order, without those that are numbers; `layer` is "" outside of all layers."""

    layer: str
    nodes: tuple[int, ...]

    @cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.nodes)

    @cached_property
    def places(self) -> dict[int, int]:
        """Returns the position of each node in the block."""
        return {node: place for place, node in enumerate(self.nodes)}


@dataclass(frozen=True)
class Blocks:
    """All blocks of a problem, in the order of the forward.

    Attributes:
        all: the blocks; each operator of the forward is in one.
        leaving: roots that are read outside of their block. They are saved, so that each block can be recomputed from
            them alone.
        classes: for each block the index of the first one with the same operators on the same sizes.
        of_run: returns the sets of nodes that plans for one run of a tape alone save.
    """

    problem: Problem
    all: tuple[Block, ...]
    leaving: frozenset[int]
    classes: tuple[int, ...]
    of_run: PlansOfRun

    @cached_property
    def representatives(self) -> dict[int, int]:
        """Returns one block of each class: the middle one, whose neighbours are most like those of the rest."""
        members: dict[int, list[int]] = {}
        for index, first in enumerate(self.classes):
            members.setdefault(first, []).append(index)
        return {first: indices[len(indices) // 2] for first, indices in members.items()}

    def translated(self, nodes: Collection[int], source: int, target: int) -> frozenset[int]:
        """Returns the nodes of block `target` at the positions of `nodes` in `source`, a block of the same class."""
        places = self.all[source].places
        return frozenset(self.all[target].nodes[places[node]] for node in nodes)

    @cached_property
    def index(self) -> dict[int, int]:
        """Returns the block of each node of the forward, except nodes that are numbers."""
        return {node: index for index, block in enumerate(self.all) for node in block.nodes}

    @cached_property
    def index_table(self) -> np.ndarray:
        """Returns `index` as an array by node; -1 for nodes in no block."""
        return np.array([self.index.get(node, -1) for node in range(len(self.problem.names))], dtype=np.intp)

    @cached_property
    def layer_table(self) -> np.ndarray:
        """Returns the block of each node's layer, for the backward's nodes too. On a tape of several runs, a node
        outside of layers has its run's first block outside of layers. -1 for other nodes, and for views, which many
        layers may read."""
        problem = self.problem
        layers = {block.layer: index for index, block in enumerate(self.all) if block.layer}
        runs: dict[int, int] = {}
        is_tape = max(problem.runs, default=0) > 0
        for index, block in enumerate(self.all):
            if not block.layer and is_tape:
                runs.setdefault(problem.runs[block.nodes[0]], index)
        columns = zip(problem.layers, problem.is_view, problem.runs, strict=True)
        blocks = (-1 if view else layers.get(layer, runs.get(run, -1)) for layer, view, run in columns)
        return np.fromiter(blocks, dtype=np.intp)

    def with_borders(self, block: Block) -> tuple[frozenset[int], ...]:
        """Returns the sets of roots that a block may save, from all activations to few; all include the roots that
        leave the block."""
        problem, leaving = self.problem, self.leaving & block.members
        activations = (problem.activations & block.members) - leaving
        statistics = frozenset(node for node in activations if problem.is_statistic[node] or problem.is_kept[node])
        sets = dict.fromkeys((leaving | activations, leaving | statistics))
        cut = cut_of(problem, block.nodes, leaving)
        if cut is not None:
            most = sum(problem.bytes[node] for node in activations) / MEGA
            # Points between the hull's corners only for layers, which take most of the time and bytes.
            between = _between(cut, most) if block.layer else ()
            for solution in (*_hull(cut), *between):
                sets.setdefault(leaving | cut.saved(solution))
        for saved in self.of_run(problem.runs[block.nodes[0]]):
            sets.setdefault(leaving | (saved & block.members))
        return tuple(sets)

    def without_borders(self, block: Block) -> tuple[frozenset[int], ...]:
        """Returns further sets, in which the roots that leave the block may be recomputed too, such as a sum from its
        operands."""
        cut = cut_of(self.problem, block.nodes, wanted=self.leaving & block.members)
        of_run = (saved & block.members for saved in self.of_run(self.problem.runs[block.nodes[0]]))
        return () if cut is None else tuple(dict.fromkeys((*map(cut.saved, _hull(cut)), *of_run)))


def no_plans(run: int) -> Iterable[frozenset[int]]:
    """Returns no plans; for a graph that runs alone."""
    return ()


def blocks_of(problem: Problem, of_run: PlansOfRun = no_plans, *, are_runs: bool = False) -> Blocks:
    """Returns the layers and the operators between them as blocks; or the runs of a tape."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    layer = ""
    for node, is_forward in enumerate(problem.is_forward):
        if is_forward and not problem.is_number[node]:
            own = "" if are_runs else problem.layers[node]
            layer = own or layer
            groups.setdefault((own, layer, problem.runs[node]), []).append(node)
    blocks = tuple(Block(own, tuple(nodes)) for (own, *_), nodes in groups.items())
    block_of = {node: index for index, block in enumerate(blocks) for node in block.nodes}
    leaving: set[int] = set()
    for node, index in block_of.items():
        roots = [problem.roots[read] for read in problem.reads[node]] if not problem.is_view[node] else []
        elsewhere = [root for root in roots if block_of.get(root, index) != index]
        # An inlined fill is recomputed by each of its readers.
        leaving.update(root for root in elsewhere if problem.is_tensor[root] and not problem.is_view[root])
    backward_reads = frozenset(problem.backward_reads)

    def signature(block: Block) -> Iterator[object]:
        """Yields a key that is equal for blocks that can have the same plans."""
        for node in block.nodes:
            # Of reads from other blocks only the count matters.
            reads = tuple(block.places.get(read, -1) for read in problem.reads[node] if not problem.is_number[read])
            sizes = problem.bytes[node], problem.workspaces[node]
            yield problem.kinds[node], sizes, node in leaving, node in backward_reads, reads

    first: dict[object, int] = {}
    classes = tuple(first.setdefault(tuple(signature(block)), index) for index, block in enumerate(blocks))
    return Blocks(problem, blocks, frozenset(leaving), classes, of_run)


def _hull(cut: Cut) -> Iterator[np.ndarray]:
    """Yields corners of the convex hull; finds one between two others at the price at which these cost the same."""
    few, many = cut.at_price(_HIGHEST), cut.at_price(LOWEST_PRICE)
    yield from (few, many)
    todo = [(few, many)]
    for _ in range(_HULL):
        if not todo:
            return
        few, many = todo.pop(0)
        bytes_between = cut.megabytes @ (many - few)
        seconds_between = cut.microseconds @ (few - many)
        if bytes_between < 1e-6 or seconds_between < 1e-6:
            continue
        price = seconds_between / bytes_between
        middle = cut.at_price(price)
        total = cut.microseconds + price * cut.megabytes
        if total @ middle < total @ few - 1e-6 * max(1.0, total @ few):
            yield middle
            todo += [(few, middle), (middle, many)]


def _between(cut: Cut, most: float) -> Iterator[np.ndarray]:
    for step in range(1, _BETWEEN):
        solution = cut.within(cut.megabytes[np.newaxis], np.array([most * step / _BETWEEN]))
        if solution is not None:
            yield solution
