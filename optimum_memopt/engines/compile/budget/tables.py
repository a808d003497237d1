"""What every simulation of a joint graph reads, whatever is saved. Pure."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from optimum_memopt.engines.compile.budget.problem import Problem


@dataclass(frozen=True, eq=False)
class Tables:
    """Arrays by node, and the parts of a run's order that are the same for all choices.

    Attributes:
        sizes: `Problem.bytes`.
        workspaces: `Problem.workspaces`.
        owns: operators that allocate a storage of their own, whether anything reads it or not.
        read_roots: the roots that all nodes read, one node's after the other's.
        first_read: where those of each node begin.
        reads: how many there are.
        storages: roots that operators allocate.
        allocators: of each of `storages`, the operator.
        picks: `Problem.picks`, -1 for None.
        read_numbers: what each node reads of `Problem.numbers`.
        backward: each of the backward's own operators, and what else it reads that is computed.
        always: what the forward's outputs need.
    """

    sizes: np.ndarray
    workspaces: np.ndarray
    owns: np.ndarray
    read_roots: np.ndarray
    first_read: np.ndarray
    reads: np.ndarray
    storages: np.ndarray
    allocators: np.ndarray
    picks: np.ndarray
    read_numbers: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, tuple[int, ...]], ...]
    always: frozenset[int]


def tables_of(problem: "Problem") -> Tables:
    """The tables of a problem."""
    counts = np.array([len(reads) for reads in problem.reads], dtype=np.intp)
    roots = problem.roots
    own = set(problem.backward_operators)
    pairs = [(storage, node) for node, found in enumerate(problem.allocates) for storage in found]
    return Tables(
        sizes=np.array(problem.bytes, dtype=np.int64),
        workspaces=np.array(problem.workspaces, dtype=np.int64),
        owns=np.array([root == node and problem.is_operator[node] for node, root in enumerate(roots)], dtype=bool),
        read_roots=np.array([roots[read] for reads in problem.reads for read in reads], dtype=np.intp),
        first_read=np.cumsum(counts) - counts,
        reads=counts,
        storages=np.array([storage for storage, _ in pairs], dtype=np.intp),
        allocators=np.array([node for _, node in pairs], dtype=np.intp),
        picks=np.array([-1 if source is None else source for source in problem.picks], dtype=np.intp),
        read_numbers=tuple(tuple(read for read in reads if read in problem.numbers) for reads in problem.reads),
        backward=tuple(
            (node, tuple(read for read in problem.reads[node] if read not in own and not problem.is_input[read]))
            for node in problem.backward_operators
        ),
        always=frozenset(problem.needed(problem.forward_outputs)),
    )
