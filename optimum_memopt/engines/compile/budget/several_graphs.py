"""The graphs that graph breaks split a training forward into, under one budget.

torch compiles and runs each before it traces the next one. So the first plan of a graph is made as if no other one
followed. Where that leaves a later graph too little, the forward is compiled again, and each graph leaves what those
behind it take at least. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from optimum_memopt.engines.compile.budget.largest_sizes import is_rows
from optimum_memopt.engines.compile.budget.problem import ALONE, OtherGraphs, Problem
from optimum_memopt.engines.compile.budget.solve import Solver
from optimum_memopt.engines.compile.memory.symbolic_sizes import SymbolValues
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
        return {symbol: size for symbol, size in self.sizes.items() if is_rows(self.names.get(symbol, ""))}


class SeveralGraphs:
    """The graphs of one forward, as far as compiling it has shown them."""

    def __init__(self) -> None:
        self._known: list[KnownGraph] = []
        # Of the last time that something was learned.
        self._signatures: tuple[GraphSignature, ...] = ()
        self._others: tuple[OtherGraphs, ...] = ()
        self._reserve = 0

    @property
    def count(self) -> int:
        """How many are known."""
        return len(self._known)

    @property
    def reserved(self) -> int:
        """Bytes that the first one leaves for those behind it."""
        return self._others[0].later if self._others else 0

    def note(self, index: int, graph: KnownGraph) -> None:
        """A graph is planned.

        Args:
            index: its place in the forward.
            graph: how often it runs is not known yet.
        """
        if index < len(self._known) and self._known[index].signature == graph.signature:
            graph = replace(graph, runs=self._known[index].runs)
        self._known[index : index + 1] = [graph]

    def others(self, index: int, signature: GraphSignature, times: int = 1) -> OtherGraphs:
        """What the forward holds around a graph, as was learned.

        Args:
            index: its place in the forward.
            signature: of the graph; torch may compile one of several graphs again, alone.
            times: the batch is one of so many parts of the rows.
        """
        if signature not in self._signatures[index : index + 1]:
            return ALONE
        return self._others[index] if times == 1 else self._found(times)[index]

    def learn(self, runs: Sequence[int], lacking: int = 0) -> bool:
        """Take in a forward whose plans did not fit together.

        Args:
            runs: how often each of its graphs ran, as far as it came.
            lacking: bytes, held back too if all that this forward shows was known.

        Returns:
            Whether the next plans are made for something else.
        """
        for index, count in enumerate(runs):
            self._known[index] = replace(self._known[index], runs=count)
        signatures = tuple(graph.signature for graph in self._known)
        before = tuple(self.others(index, signature) for index, signature in enumerate(signatures))
        found = self._found()
        if found == before and lacking:
            self._reserve += lacking
            found = self._found()
        self._signatures, self._others = signatures, found
        return found != before

    def _found(self, times: int = 1) -> tuple[OtherGraphs, ...]:
        """What the forward holds around each graph if all behind it take as little as they can."""
        problems = [graph.problem(times) for graph in self._known]
        given = [sum(problem.bytes[node] for node in problem.tangents) for problem in problems]
        found: list[OtherGraphs] = []
        later, gradients = 0, 0
        for index in reversed(range(len(problems))):
            others = OtherGraphs(later, max(0, gradients), self._known[index].runs)
            found.insert(0, others)
            lowest = Solver(replace(problems[index], others=others)).lowest
            later = lowest.peak + self._reserve
            # What a backward is given is what the one behind it has returned, and is counted there.
            own = lowest.backward.end - given[index]
            gradients += others.runs * own + given[index] - (given[index - 1] if index else 0)
        return tuple(found)
