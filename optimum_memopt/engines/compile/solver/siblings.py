"""The graphs that graph breaks split a training forward into, under one budget.

torch compiles and runs each before it traces the next one. So the first plan of a graph is made as if no other one
followed. Where that leaves a later graph too little, the forward is compiled again, and each graph leaves to those
behind it what they take at least, or more where all together are faster then. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from optimum_memopt.engines.compile.graph.problem import ALONE, Problem, SiblingGraphs
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, rows_of
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.engines.compile.solver.offload import Host, fits
from optimum_memopt.engines.compile.solver.solver import Solver
from optimum_memopt.plans.plan_file import GraphSignature


@dataclass(frozen=True)
class KnownGraph:
    """A graph that a plan was asked for.

    Attributes:
        signature: tells it from others.
        problem_at: the graph as numbers, for any sizes.
        sizes: that it is planned for.
        names: of the symbols that are sizes of inputs, `input_ids_dim0`.
        runs: how often it ran in a forward.
    """

    signature: GraphSignature
    problem_at: Callable[[SymbolValues], Problem]
    sizes: SymbolValues
    names: Mapping[sympy.Symbol, str]
    runs: int = 1

    def problem(self, times: int = 1) -> Problem:
        """Of its sizes, or of one of `times` parts of their rows."""
        rows = {symbol: max(1, size // times) for symbol, size in self.rows.items()}
        return self.problem_at({**self.sizes, **rows})

    @property
    def rows(self) -> dict[sympy.Symbol, int]:
        """Its sizes that are rows of the batch."""
        return rows_of(self.sizes, self.names)


class GraphReservations:
    """The graphs of one forward, as far as compiling it has shown them."""

    def __init__(self) -> None:
        self._known: list[KnownGraph] = []
        # Of the last time that something was learned.
        self._learned: tuple[KnownGraph, ...] = ()
        self._siblings: tuple[SiblingGraphs, ...] = ()
        self._share = 0.0
        self._reserve = 0

    @property
    def count(self) -> int:
        """How many are known."""
        return len(self._known)

    @property
    def reserved(self) -> int:
        """Bytes that the first one leaves to those behind it."""
        return self._siblings[0].later if self._siblings else 0

    def note(self, index: int, graph: KnownGraph) -> None:
        """A graph is planned.

        Args:
            index: its place in the forward.
            graph: how often it runs is not known yet.
        """
        if index < len(self._known) and self._known[index].signature == graph.signature:
            self._known[index] = replace(graph, runs=self._known[index].runs)
        else:
            # What came behind another graph is not known to come behind this one.
            self._known[index:] = [graph]

    def siblings(self, index: int, signature: GraphSignature, times: int = 1) -> SiblingGraphs:
        """What the forward holds around a graph, as was learned.

        Args:
            index: its place in the forward.
            signature: of the graph; torch may compile one of several graphs again, alone.
            times: the batch is one of so many parts of the rows, and later graphs take as little as they can.
        """
        if index >= len(self._learned) or self._learned[index].signature != signature:
            return ALONE
        return self._siblings[index] if times == 1 else self._solver(times).siblings(0)[index]

    def learn(self, runs: Sequence[int], allowed: int, lacking: int = 0) -> bool:
        """Take in a forward whose plans did not fit together.

        Args:
            runs: how often each of its graphs ran, as far as it came.
            allowed: bytes that all of them may hold.
            lacking: bytes. If all that this forward shows was known, the process has grown: later graphs are left no
                more than they take at least, then that much more.

        Returns:
            Whether the next plans are made for something else.
        """
        for index, count in enumerate(runs):
            self._known[index] = replace(self._known[index], runs=count)
        before = tuple(self.siblings(index, graph.signature) for index, graph in enumerate(self._known))
        is_new = [(graph.signature, graph.runs) for graph in self._learned] != [
            (graph.signature, graph.runs) for graph in self._known
        ]
        if runs and not is_new and not self._share:
            self._reserve += lacking
        self._learned = tuple(self._known)
        solver = self._solver()
        if is_new:
            self._share = solver.fastest_share(allowed)
        elif lacking:
            self._share = 0.0
        self._siblings = solver.siblings(self._share)
        return self._siblings != before

    def _solver(self, times: int = 1) -> MultiGraphSolver:
        problems, runs = zip(*((graph.problem(times), graph.runs) for graph in self._learned), strict=True)
        return MultiGraphSolver(problems, runs, self._reserve)


@dataclass(frozen=True)
class SmallerBatch:
    """A micro-batch that fits.

    Attributes:
        rows: of the micro-batch.
        times: gradient accumulation that keeps the rows of an optimizer step.
    """

    rows: int
    times: int


def smaller_batch(
    graph: KnownGraph,
    siblings_at: Callable[[int], SiblingGraphs],
    outside: Footprint,
    budget: int,
    host: Host | None,
) -> SmallerBatch | None:
    """The largest half, quarter and so on of a batch for which a plan fits; None where there is none for one row.

    Args:
        graph: that does not fit.
        siblings_at: other graphs of the forward with one of so many parts of the rows.
        outside: what the step holds beside its graphs.
        budget: bytes that the step's peak must not pass.
        host: where activations may wait; None: nowhere.
    """
    rows = set(graph.rows.values())
    if len(rows) != 1:
        return None
    (whole,) = rows
    times = 2
    while whole % times == 0:
        # Gradients of the earlier micro-batches are there while a later one runs.
        step = replace(outside, batch=outside.batch // times, accumulated=outside.gradients)
        allowed = step.activations_within(budget)
        if fits(Solver(graph.problem(times)).with_siblings(siblings_at(times)), allowed, host):
            return SmallerBatch(whole // times, times)
        times *= 2
    return None
