"""The forward in units that can be planned alone: transformer layers, and what stands before, between and after them.

Pure.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem


@dataclass(frozen=True)
class Unit:
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
        """Where each node stands in the unit."""
        return {node: place for place, node in enumerate(self.nodes)}


@dataclass(frozen=True)
class Units:
    """All units of a problem, in the order of the forward.

    Attributes:
        all: each operator of the forward is in one.
        leaving: roots that are read outside of their unit. Whatever reads them finds them saved, so that a unit can be
            recomputed from them alone.
        classes: for each unit the first one with the same operators on the same sizes.
    """

    problem: Problem
    all: tuple[Unit, ...]
    leaving: frozenset[int]
    classes: tuple[int, ...]

    @property
    def representatives(self) -> tuple[int, ...]:
        """One unit of each class: the middle one, whose neighbours are most like those of the others."""
        members: dict[int, list[int]] = {}
        for index, first in enumerate(self.classes):
            members.setdefault(first, []).append(index)
        return tuple(found[len(found) // 2] for found in members.values())

    def translated(self, nodes: Collection[int], source: int, target: int) -> frozenset[int]:
        """The nodes of the unit `target` that stand where `nodes` stand in `source`, a unit of the same class."""
        places = self.all[source].places
        return frozenset(self.all[target].nodes[places[node]] for node in nodes)

    @cached_property
    def index(self) -> dict[int, int]:
        """The unit of each node of the forward, numbers left out."""
        return {node: index for index, unit in enumerate(self.all) for node in unit.nodes}

    @cached_property
    def index_table(self) -> np.ndarray:
        """`index` by node, -1 for those that are in no unit."""
        return np.array([self.index.get(node, -1) for node in range(len(self.problem.names))], dtype=np.intp)

    @cached_property
    def layer_table(self) -> np.ndarray:
        """By node, backward's too, the unit of its layer; -1 for those in no layer and for views, which may be read in
        many layers and compute nothing in any."""
        layers = {unit.layer: index for index, unit in enumerate(self.all) if unit.layer}
        pairs = zip(self.problem.layers, self.problem.is_view, strict=True)
        return np.array([-1 if is_view else layers.get(layer, -1) for layer, is_view in pairs], dtype=np.intp)

    @cached_property
    def reads(self) -> frozenset[int]:
        return frozenset(self.problem.backward_reads)


def units_of(problem: Problem) -> Units:
    """The units of a problem."""
    groups: dict[tuple[str, str], list[int]] = {}
    layer = ""
    for node, is_forward in enumerate(problem.is_forward):
        if not is_forward or problem.is_number[node]:
            continue
        own = problem.layers[node]
        layer = own or layer
        groups.setdefault((own, layer), []).append(node)
    found = tuple(Unit(own, tuple(nodes)) for (own, _), nodes in groups.items())
    unit_of = {node: index for index, unit in enumerate(found) for node in unit.nodes}
    leaving = {
        problem.roots[read]
        for node in unit_of
        if not problem.is_view[node]
        for read in problem.reads[node]
        if problem.roots[read] in unit_of and unit_of[problem.roots[read]] != unit_of[node]
    }
    tensors = frozenset(root for root in leaving if problem.is_tensor[root])
    return Units(problem, found, tensors, _classes(problem, found, tensors))


def _classes(problem: Problem, units: Sequence[Unit], leaving: frozenset[int]) -> tuple[int, ...]:
    reads = frozenset(problem.backward_reads)
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(_signature(problem, unit, leaving, reads), index) for index, unit in enumerate(units)
    )


def _signature(problem: Problem, unit: Unit, leaving: frozenset[int], reads: frozenset[int]) -> object:
    """Equal for units that can have the same plans."""
    return tuple(
        (
            problem.kinds[node],
            problem.bytes[node],
            problem.workspaces[node],
            node in leaving,
            node in reads,
            # Of other units only how many.
            tuple(unit.places.get(read, -1) for read in problem.reads[node] if not problem.is_number[read]),
        )
        for node in unit.nodes
    )
