"""Plans for one block: which of its results to save, at every price of a byte.

Whether to recompute an operator or to save its result is a minimum cut, whose linear program has integral solutions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.solver.blocks import Blocks, blocks_of
from optimum_memopt.engines.compile.solver.cut import LOWEST_PRICE, MEGA, Cut, cut_of

# Points of the convex hull of (bytes, seconds), and points between them, of which the hull has none.
_HULL, _BETWEEN = 24, 16
# Microseconds of a megabyte at which everything is recomputed that can be.
_HIGHEST = 1e6


@dataclass(frozen=True)
class LayerFrontiers:
    """Plans for the blocks of a problem, which are the same whatever other graphs there are in the forward.

    Attributes:
        problem: of the blocks.
    """

    problem: Problem

    @cached_property
    def blocks(self) -> Blocks:
        return blocks_of(self.problem)

    @cached_property
    def with_borders(self) -> dict[int, tuple[frozenset[int], ...]]:
        """What each plan keeps, for one block of each class; see `frontier`."""
        return {index: frontier(self.blocks, index) for index in self.blocks.representatives}

    @cached_property
    def without_borders(self) -> dict[int, tuple[frozenset[int], ...]]:
        """Further plans; see `frontier_without_borders`."""
        return {index: frontier_without_borders(self.blocks, index) for index in self.blocks.representatives}


def frontier(blocks: Blocks, index: int) -> tuple[frozenset[int], ...]:
    """Sets of roots to save in a block, from all activations to as few as possible, all with what leaves the block.

    Args:
        blocks: of a problem.
        index: of the block.
    """
    problem, block = blocks.problem, blocks.all[index]
    leaving = blocks.leaving & block.members
    activations = frozenset(node for node in block.nodes if node in problem.activations and node not in leaving)
    statistics = frozenset(node for node in activations if problem.is_statistic[node] or problem.is_kept[node])
    found = dict.fromkeys((leaving | activations, leaving | statistics))
    cut = cut_of(problem, block.nodes, leaving)
    if cut is not None:
        most = sum(problem.bytes[node] for node in activations) / MEGA
        # Between the corners of the hull only for layers, which take most of the time and bytes.
        between = _between(cut, most) if block.layer else ()
        for solution in (*_hull(cut), *between):
            found.setdefault(leaving | cut.saved(solution))
    return tuple(found)


def frontier_without_borders(blocks: Blocks, index: int) -> tuple[frozenset[int], ...]:
    """As `frontier`, where what leaves the block may be recomputed too, such as a sum from its operands."""
    block = blocks.all[index]
    cut = cut_of(blocks.problem, block.nodes, wanted=blocks.leaving & block.members)
    return () if cut is None else tuple(dict.fromkeys(map(cut.saved, _hull(cut))))


def _hull(cut: Cut) -> Iterator[np.ndarray]:
    """Corners of the convex hull, found between two corners by the price at which they cost the same."""
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
