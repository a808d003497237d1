"""Formulates recompute or save as an integer program, and calls the solver HiGHS without its output. Pure."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


# A second thread would save the first one's `os.devnull` as the output to restore.
_LOCK = threading.RLock()


@contextlib.contextmanager
def without_c_output() -> Iterator[None]:
    """Drop everything written to file descriptor 1 within the context, by other threads too; no effect on Windows.

    HiGHS prints a line for some programs whatever its log options (`printf` in
    `HighsMipSolverData::transformNewIntegerFeasibleSolution`, in scipy 1.17), which would break JSON and tables.
    """
    with _LOCK:
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


# Price in microseconds per megabyte at which everything is saved that can be.
LOWEST_PRICE = 1e-4
MEGA = 1e6
# Accepted gap to the optimum, as a share.
GAP = 1e-3
# Maximum number of branch-and-bound nodes; a time limit could give each rank a different solution.
_NODES = 200


@dataclass(frozen=True)
class Cut:
    """The integer program of some operators: one variable for each operator that may be recomputed, and one for each
    root that may be saved.

    Attributes:
        operators: column of each operator that may be recomputed.
        roots: column of each root that may be saved.
        requires: rows of coefficients; the value of each row must be at least that of `least`.
        least: 1 for a read by the backward, 0 for a read by a recomputed operator.
        microseconds: time of each column if its variable is 1.
        megabytes: size of each column if its variable is 1.
    """

    operators: Mapping[int, int]
    roots: Mapping[int, int]
    requires: "csr_matrix"
    least: np.ndarray
    microseconds: np.ndarray
    megabytes: np.ndarray

    def saved(self, solution: np.ndarray) -> frozenset[int]:
        return frozenset(root for root, column in self.roots.items() if solution[column] > 0.5)

    def at_price(self, price: float) -> np.ndarray:
        """Returns the cheapest solution at a price in microseconds per megabyte."""
        from scipy.optimize import linprog

        costs = self.microseconds + price * self.megabytes
        solved = linprog(costs, A_ub=-self.requires, b_ub=-self.least, bounds=(0, 1), method="highs-ds")
        return np.asarray(np.round(solved.x))

    def within(self, limits: "csr_matrix | np.ndarray", most: np.ndarray, gap: float = GAP) -> np.ndarray | None:
        """Returns the cheapest solution in which each row of `limits`, in megabytes, is at most `most`; None if none
        was found."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        costs, integral = self.microseconds + LOWEST_PRICE * self.megabytes, np.ones(len(self.microseconds))
        required = LinearConstraint(self.requires, self.least, np.inf)
        constraints = [required, LinearConstraint(limits, -np.inf, most)]
        options = {"mip_rel_gap": gap, "node_limit": _NODES}
        with without_c_output():
            solved = milp(costs, constraints=constraints, integrality=integral, bounds=Bounds(0, 1), options=options)
        return None if solved.x is None else np.round(solved.x)


def cut_of(
    problem: Problem, nodes: Sequence[int], given: Collection[int] = (), wanted: Collection[int] = ()
) -> Cut | None:
    """Returns the program of some operators of the forward; None if nothing that they could recompute is read.

    Args:
        given: roots that are in memory anyway.
        wanted: roots that must be available even if the backward does not read them.
    """
    computing = [node for node in nodes if problem.is_operator[node]]
    own = [node for node in computing if not problem.is_view[node] and problem.picks[node] is None]
    recomputable = [node for node in own if not problem.is_kept[node]]
    operators = {node: column for column, node in enumerate(recomputable)}
    # A fill that is inlined is its own root; it is free, and saving it would allocate it.
    allocated = [node for node in computing if problem.roots[node] == node and not problem.is_view[node]]
    savable = [node for node in allocated if problem.is_tensor[node] and node not in given]
    roots = {node: column for column, node in enumerate(savable, len(operators))}

    def requires(node: int) -> dict[int, float]:
        """Returns the coefficients of the condition that the storage of `node` is saved or recomputed."""
        root = problem.roots[node]
        if root not in roots:
            return {}
        source = problem.picks[root]
        column = operators.get(root if source is None else source)
        return {roots[root]: 1.0} if column is None else {roots[root]: 1.0, column: 1.0}

    reads = frozenset(problem.backward_reads).union(wanted)
    rows = [row for node in nodes if node in reads if (row := requires(node))]
    needed = len(rows)
    if not needed:
        return None
    for node, column in operators.items():
        for read in problem.reads[node]:
            if row := requires(read):
                rows.append({**row, column: row.get(column, 0.0) - 1.0})
    least = np.array([1.0] * needed + [0.0] * (len(rows) - needed))
    microseconds = np.array([problem.seconds[node] * MEGA for node in operators] + [0.0] * len(roots))
    megabytes = np.array([0.0] * len(operators) + [problem.bytes[node] / MEGA for node in roots])
    return Cut(operators, roots, matrix(rows, len(microseconds)), least, microseconds, megabytes)


def matrix(rows: Sequence[Mapping[int, float]], columns: int) -> "csr_matrix":
    """Returns a sparse matrix from rows of coefficients by column."""
    from scipy.sparse import csr_matrix

    entries = [(value, line, column) for line, row in enumerate(rows) for column, value in row.items()]
    values, lines, places = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_matrix((values, (lines, places)), shape=(len(rows), columns))
