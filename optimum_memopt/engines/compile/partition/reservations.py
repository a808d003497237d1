"""The graphs that graph breaks split a training forward into, under one budget.

torch compiles and runs each before it traces the next one. So the first plan of a graph is made as if no other one
followed. Where that leaves a later graph too little, the forward is compiled again, and each graph leaves to those
behind it what they take at least, or more where all together are faster then. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace

from optimum_memopt.engines.compile.graph.problem import ALONE, SiblingGraphs
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.plans.plan_file import GraphSignature


class GraphReservations:
    """The graphs of one forward, as far as compiling it has shown them."""

    def __init__(self) -> None:
        self._known: list[CapturedGraph] = []
        # Of the last time that something was learned.
        self._learned: tuple[CapturedGraph, ...] = ()
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

    def note(self, index: int, graph: CapturedGraph) -> None:
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
