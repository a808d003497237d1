"""Which of a model's training graphs a step is predicted from."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.symbol_names import input_sizes


class Predictors:
    """Those of one forward: torch traces it again where a guard fails, as for a length that is a constant of a graph,
    and what was traced first says nothing of such a batch.

    Args:
        first: of the first training forward.

    Attributes:
        first: see above.
    """

    def __init__(self, first: StepMemoryPredictor) -> None:
        self.first = first
        self._by_graphs: dict[frozenset[PartitionedGraph], StepMemoryPredictor] = {}
        # Of batches that others than the first are for.
        self._by_sizes: dict[frozenset[tuple[str, int]], StepMemoryPredictor] = {}

    def __iter__(self) -> Iterator[StepMemoryPredictor]:
        return iter(dict.fromkeys((self.first, *self._by_graphs.values())))

    def of(self, inputs: Mapping[str, object]) -> StepMemoryPredictor:
        """The one for a batch, as far as one of its sizes has run; else the first.

        Args:
            inputs: keyword arguments of a forward.
        """
        return self._by_sizes.get(_sizes(inputs), self.first)

    def note_forward(
        self, ran: Sequence[PartitionedGraph], inputs: Mapping[str, object], outputs: object = None
    ) -> None:
        """Count a training forward among those of the run.

        Args:
            ran: its graphs, in the order that they ran, one that has run several times as often.
            inputs: its keyword arguments.
            outputs: what it returned.
        """
        predictor = self._predictor(Counter(ran), inputs)
        if predictor is not self.first:
            self._by_sizes[_sizes(inputs)] = predictor
        predictor.note_forward(inputs, outputs)

    def _predictor(self, ran: Mapping[PartitionedGraph, int], inputs: Mapping[str, object]) -> StepMemoryPredictor:
        # How often a graph runs may differ at every step, as where layers are dropped.
        key = frozenset(ran)
        if key not in self._by_graphs:
            found = self.first.of_others(ran, inputs) if self._by_graphs and ran else None
            self._by_graphs[key] = found or self.first
        return self._by_graphs[key]


def _sizes(inputs: Mapping[str, object]) -> frozenset[tuple[str, int]]:
    return frozenset(input_sizes(inputs).items())
