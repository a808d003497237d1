"""What a producer is."""

from collections.abc import Sequence
from typing import Protocol

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.plans.matching import Matched


class Producer(Protocol):
    """Makes a choice for each joint graph of a training forward."""

    @classmethod
    def of(cls, selection: Selection) -> "Producer | None":
        """The producer of what the user asked for; None where that is another one's."""

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """The rows that are asked for.

        Args:
            candidates: of one graph, or of all graphs of a forward.
        """

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """The choice for a graph.

        Args:
            graph: read, not changed.
            earlier: choices of the graphs of the same forward before this one.
        """


class InternalProducer:
    """Base of producers that no option selects, and that ask for no row by name."""

    @classmethod
    def of(cls, selection: Selection) -> None:
        """See `Producer.of`."""
        return None

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """See `Producer.match`."""
        return Matched()
