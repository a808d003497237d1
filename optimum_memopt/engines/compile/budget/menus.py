"""Plans for one unit: which of its results to save, at every price of a byte.

Whether to recompute an operator or to save its result is a minimum cut, whose linear program has integral solutions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

from optimum_memopt.engines.compile.budget.problem import Problem
from optimum_memopt.engines.compile.budget.units import Units

# Points of the convex hull of (bytes, seconds), and points between them, of which the hull has none.
_HULL, _BETWEEN = 24, 16
# Prices of a megabyte, in microseconds: what is cheaper is saved, what is dearer recomputed.
_LOWEST, _HIGHEST = 1e-4, 1e6
_MEGA = 1e6


@dataclass(frozen=True)
class _Cut:
    """The program of one unit: a variable for each operator that may be recomputed, and for each root to save.

    Attributes:
        operators: the operators of the first variables.
        roots: the roots of the others.
        requires: rows of coefficients; each row is at least `least`.
        least: 1 where the backward reads, 0 where an operator that is recomputed reads.
        microseconds: of each variable.
        megabytes: of each variable.
    """

    operators: tuple[int, ...]
    roots: tuple[int, ...]
    requires: csr_matrix
    least: np.ndarray
    microseconds: np.ndarray
    megabytes: np.ndarray

    def saved(self, solution: np.ndarray) -> frozenset[int]:
        return frozenset(
            root for root, share in zip(self.roots, solution[len(self.operators) :], strict=True) if share > 0.5
        )

    def at_price(self, price: float) -> np.ndarray:
        """The cheapest solution where a megabyte costs so many microseconds."""
        found = linprog(
            self.microseconds + price * self.megabytes,
            A_ub=-self.requires,
            b_ub=-self.least,
            bounds=(0, 1),
            method="highs-ds",
        )
        return np.asarray(np.round(found.x))

    def within(self, megabytes: float) -> np.ndarray | None:
        """The cheapest solution of at most so many megabytes; None where there is none."""
        found = milp(
            self.microseconds + _LOWEST * self.megabytes,
            constraints=[
                LinearConstraint(self.requires, self.least, np.inf),
                LinearConstraint(csr_matrix(self.megabytes), -np.inf, megabytes),
            ],
            integrality=np.ones(len(self.microseconds)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-3, "node_limit": 200},
        )
        return None if found.x is None else np.round(found.x)


def menu(units: Units, index: int) -> tuple[frozenset[int], ...]:
    """Sets of roots to save in a unit, without those that leave it, from all activations to as few as possible.

    Args:
        units: of a problem.
        index: of the unit.
    """
    problem, unit = units.problem, units.all[index]
    activations = frozenset(node for node in unit.nodes if node in problem.activations and node not in units.leaving)
    statistics = frozenset(node for node in activations if problem.is_statistic[node] or problem.is_kept[node])
    found = dict.fromkeys((activations, statistics))
    cut = _cut(units, index)
    if cut is not None:
        most = sum(problem.bytes[node] for node in activations) / _MEGA
        # Between the corners of the hull only for units of which there are many.
        between = _between(cut, most) if units.classes.count(units.classes[index]) > 1 else ()
        for solution in (*_hull(cut), *between):
            found.setdefault(cut.saved(solution))
    return tuple(found)


def _hull(cut: _Cut) -> Iterator[np.ndarray]:
    """Corners of the convex hull, found between two corners by the price at which they cost the same."""
    few, many = cut.at_price(_HIGHEST), cut.at_price(_LOWEST)
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


def _between(cut: _Cut, most: float) -> Iterator[np.ndarray]:
    for step in range(1, _BETWEEN):
        solution = cut.within(most * step / _BETWEEN)
        if solution is not None:
            yield solution


def _cut(units: Units, index: int) -> _Cut | None:
    """The program of a unit; None where the backward reads nothing that it could recompute."""
    problem, unit = units.problem, units.all[index]
    operators = [
        node
        for node in unit.nodes
        if problem.is_operator[node] and not problem.is_view[node] and problem.picks[node] is None
        if not problem.is_kept[node]
    ]
    roots = [
        node
        for node in unit.nodes
        if problem.roots[node] == node and problem.is_tensor[node] and node not in units.leaving
        if problem.is_operator[node]
    ]
    place = {node: column for column, node in enumerate(operators)}
    root_place = {node: len(operators) + column for column, node in enumerate(roots)}
    rows = [
        row for node in unit.nodes if node in units.reads if (row := _requires(problem, node, place, root_place, None))
    ]
    needed = len(rows)
    for node in operators:
        for read in problem.reads[node]:
            if row := _requires(problem, read, place, root_place, node):
                rows.append(row)
    if not needed:
        return None
    least = np.array([1.0] * needed + [0.0] * (len(rows) - needed))
    zeros = [0.0]
    return _Cut(
        tuple(operators),
        tuple(roots),
        _matrix(rows, len(operators) + len(roots)),
        least,
        np.array([problem.seconds[node] * _MEGA for node in operators] + zeros * len(roots)),
        np.array(zeros * len(operators) + [problem.bytes[node] / _MEGA for node in roots]),
    )


def _requires(
    problem: Problem, node: int, place: Mapping[int, int], root_place: Mapping[int, int], reader: int | None
) -> dict[int, float]:
    """Coefficients of: what `node` lies in is saved or recomputed if `reader` is recomputed (None: always)."""
    root = problem.roots[node]
    if root not in root_place:
        return {}
    row = {root_place[root]: 1.0}
    source = problem.picks[root]
    source = root if source is None else source
    if source in place:
        row[place[source]] = 1.0
    if reader is not None:
        row[place[reader]] = row.get(place[reader], 0.0) - 1.0
    return row


def _matrix(rows: list[dict[int, float]], columns: int) -> csr_matrix:
    places = [(line, column) for line, row in enumerate(rows) for column in row]
    values = [value for row in rows for value in row.values()]
    lines, found = ([place[axis] for place in places] for axis in (0, 1))
    return csr_matrix((values, (lines, found)), shape=(len(rows), columns))
