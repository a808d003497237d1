"""Keeps what a library in C prints out of this process's standard output."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


# A second thread would take the first one's `os.devnull` for the output to restore.
_LOCK = threading.RLock()


@contextlib.contextmanager
def without_c_output() -> Iterator[None]:
    """Drop what is written to descriptor 1 meanwhile, by other threads too; elsewhere than on Linux and macOS nothing.

    One thread at a time; a second one waits.

    HiGHS prints a line for some programs whatever it is told about its log (`printf` in
    `HighsMipSolverData::transformNewIntegerFeasibleSolution`, in scipy 1.17), which would break JSON and tables.
    """
    with _LOCK, _redirected():
        yield


@contextlib.contextmanager
def _redirected() -> Iterator[None]:
    kept = None
    if sys.platform != "win32":
        # Standard output may be closed.
        with contextlib.suppress(OSError):
            kept = os.dup(1)
    if kept is None:
        yield
        return
    buffers = ctypes.CDLL(None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.flush()
        buffers.fflush(None)
        os.dup2(nowhere, 1)
        yield
    finally:
        buffers.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


# Microseconds of a megabyte at which everything is saved that can be.
LOWEST_PRICE = 1e-4
MEGA = 1e6
# To the optimum, as a share.
GAP = 1e-3


@dataclass(frozen=True)
class Cut:
    """The program of some operators: a variable for each one that may be recomputed, and for each root to save.

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
    requires: "csr_matrix"
    least: np.ndarray
    microseconds: np.ndarray
    megabytes: np.ndarray

    @cached_property
    def columns(self) -> dict[int, int]:
        """The variable of each root to save."""
        return {root: len(self.operators) + place for place, root in enumerate(self.roots)}

    @cached_property
    def operator_columns(self) -> dict[int, int]:
        """The variable of each operator to recompute."""
        return {node: place for place, node in enumerate(self.operators)}

    def saved(self, solution: np.ndarray) -> frozenset[int]:
        return frozenset(
            root for root, share in zip(self.roots, solution[len(self.operators) :], strict=True) if share > 0.5
        )

    def at_price(self, price: float) -> np.ndarray:
        """The cheapest solution where a megabyte costs so many microseconds."""
        from scipy.optimize import linprog

        found = linprog(
            self.microseconds + price * self.megabytes,
            A_ub=-self.requires,
            b_ub=-self.least,
            bounds=(0, 1),
            method="highs-ds",
        )
        return np.asarray(np.round(found.x))

    def within(
        self, limits: "csr_matrix | np.ndarray", most: np.ndarray, gap: float = GAP, nodes: int = 200
    ) -> np.ndarray | None:
        """The cheapest solution within limits of bytes; None where none was found.

        Args:
            limits: rows of megabytes of the variables.
            most: of each row.
            gap: to the optimum, as a share.
            nodes: of the search; a limit of time would have other solutions on another rank.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        with without_c_output():
            found = milp(
                self.microseconds + LOWEST_PRICE * self.megabytes,
                constraints=[
                    LinearConstraint(self.requires, self.least, np.inf),
                    LinearConstraint(limits, -np.inf, most),
                ],
                integrality=np.ones(len(self.microseconds)),
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": gap, "node_limit": nodes},
            )
        return None if found.x is None else np.round(found.x)


def cut_of(
    problem: Problem, nodes: Sequence[int], given: Collection[int] = (), wanted: Collection[int] = ()
) -> Cut | None:
    """The program of some operators; None where nothing is read that they could recompute.

    Args:
        problem: of which they are.
        nodes: operators of the forward.
        given: roots that are there anyway.
        wanted: roots that are read by more than the backward.
    """
    operators = [
        node
        for node in nodes
        if problem.is_operator[node] and not problem.is_view[node] and problem.picks[node] is None
        if not problem.is_kept[node]
    ]
    roots = [
        node
        for node in nodes
        if problem.roots[node] == node and problem.is_tensor[node] and problem.is_operator[node] and node not in given
    ]
    place = {node: column for column, node in enumerate(operators)}
    root_place = {node: len(operators) + column for column, node in enumerate(roots)}
    reads = frozenset(problem.backward_reads).union(wanted)
    rows = [row for node in nodes if node in reads if (row := _requires(problem, node, place, root_place, None))]
    needed = len(rows)
    for node in operators:
        for read in problem.reads[node]:
            if row := _requires(problem, read, place, root_place, node):
                rows.append(row)
    if not needed:
        return None
    zeros = [0.0]
    return Cut(
        tuple(operators),
        tuple(roots),
        matrix(rows, len(operators) + len(roots)),
        np.array([1.0] * needed + [0.0] * (len(rows) - needed)),
        np.array([problem.seconds[node] * MEGA for node in operators] + zeros * len(roots)),
        np.array(zeros * len(operators) + [problem.bytes[node] / MEGA for node in roots]),
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


def matrix(rows: list[dict[int, float]], columns: int) -> "csr_matrix":
    """Sparse rows of coefficients by column."""
    from scipy.sparse import csr_matrix

    places = [(line, column) for line, row in enumerate(rows) for column in row]
    values = [value for row in rows for value in row.values()]
    lines, found = ([place[axis] for place in places] for axis in (0, 1))
    return csr_matrix((values, (lines, found)), shape=(len(rows), columns))
