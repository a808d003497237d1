"""The choice between recompute and saving as an integer program, and the solver HiGHS without its output. Pure."""

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


# A second thread would take the first one's `os.devnull` for the output to restore.
_LOCK = threading.RLock()


@contextlib.contextmanager
def without_c_output() -> Iterator[None]:
    """Drop what is written to descriptor 1 meanwhile, by other threads too; elsewhere than on Linux and macOS nothing.

    HiGHS prints a line for some programs whatever it is told about its log (`printf` in
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


# Microseconds of a megabyte at which everything is saved that can be.
LOWEST_PRICE = 1e-4
MEGA = 1e6
# To the optimum, as a share.
GAP = 1e-3
# Of a search; a limit of time would have other solutions on another rank.
_NODES = 200


@dataclass(frozen=True)
class Cut:
    """The program of some operators: a variable for each one that may be recomputed, and for each root to save.

    Attributes:
        requires: rows of coefficients; each row is at least `least`.
        least: 1 where the backward reads, 0 where an operator that is recomputed reads.
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
        """The cheapest solution at a price of a megabyte in microseconds."""
        from scipy.optimize import linprog

        costs = self.microseconds + price * self.megabytes
        solved = linprog(costs, A_ub=-self.requires, b_ub=-self.least, bounds=(0, 1), method="highs-ds")
        return np.asarray(np.round(solved.x))

    def within(self, limits: "csr_matrix | np.ndarray", most: np.ndarray, gap: float = GAP) -> np.ndarray | None:
        """The cheapest solution with each row of `limits`, in megabytes, `most` at most; None where none was found."""
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
    """The program of some operators of the forward; None where nothing is read that they could recompute.

    Args:
        given: roots that are there anyway.
        wanted: roots that are read by more than the backward.
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
        """Coefficients of: the storage that `node` lies in is saved or recomputed."""
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
    """Sparse rows of coefficients by column."""
    from scipy.sparse import csr_matrix

    entries = [(value, line, column) for line, row in enumerate(rows) for column, value in row.items()]
    values, lines, places = zip(*entries, strict=True) if entries else ((), (), ())
    return csr_matrix((values, (lines, places)), shape=(len(rows), columns))
