"""A captured training forward: its graphs and the tape of their runs, for any batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.graph.analyzed_graph import with_gradient, without_gradient
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.tape import Tape, resized
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem, problem_of_tape
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.partition.choice import SavedNodes
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.simulator.events import StepEvents

_T = TypeVar("_T")


def trained_by(tape: Tape, graphs: Sequence[PartitionedGraph]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of a forward's trained parameters, and of its untrained ones, whose gradient stays None.

    A parameter that no graph reads is in neither, since other code may read it.
    """
    trained, unread = set[str](), set[str]()
    for number, graph in enumerate(graphs):
        calls = [call for call in tape.calls if call.graph == number]
        places = {name: place for call in calls for place, name in call.parameters.items()}
        for name in with_gradient([graph.gradients]):
            # A graph names parameters after the layer that it was traced for.
            traced = next((call.layer for call in calls if call.layer and name.startswith(f"{call.layer}.")), "")
            results = graph.sources.get(places.get(name, -1), frozenset())
            for call in calls:
                own = f"{call.layer}{name.removeprefix(traced)}" if traced else name
                is_unread = call.is_unread or (bool(results) and results <= call.unread)
                (unread if is_unread else trained).add(own)
    without = without_gradient(graph.gradients for graph in graphs)
    return frozenset(trained), without | (unread - trained)


@dataclass(frozen=True, eq=False)
class CapturedForward:
    """A training forward.

    Attributes:
        graphs: its graphs, in the order of their first runs.
        tape: the runs of the graphs.
        untrained: names of parameters that require a gradient and get none.
    """

    graphs: tuple[CapturedGraph, ...]
    tape: Tape = field(default_factory=Tape.of_one)
    untrained: frozenset[str] = frozenset()

    @property
    def costs(self) -> str:
        """Returns the source of the operators' seconds, see `Costs.source`."""
        return self.graphs[0].costs.source

    @property
    def chunks_loss(self) -> bool:
        return any(graph.chunks_loss for graph in self.graphs)

    @property
    def is_whole(self) -> bool:
        """True if nothing that is differentiated runs outside of its graphs."""
        return all(graph.partitioned is not None and graph.partitioned.is_all_of_forward for graph in self.graphs)

    @property
    def run_keys(self) -> tuple[tuple[str, str, int], ...]:
        """Returns the keys of the runs, see `Tape.run_keys`."""
        return self.tape.run_keys([graph.digest for graph in self.graphs])

    def without_caller(self) -> "CapturedForward":
        """Returns the forward with its tape changed by `Tape.without_caller`."""
        return replace(self, tape=self.tape.without_caller())

    def planned_by(self, index: int) -> "CapturedForward":
        """Returns the forward under one of the recorded plans; only the first of them recomputes or offloads what
        passes between layers."""
        graphs = tuple(replace(graph, plans=(graph.plans[index],)) for graph in self.graphs)
        return replace(self, graphs=graphs, tape=self.tape if index == 0 else self.tape.with_all_held())

    @property
    def first(self) -> list[SymbolValues]:
        """Returns each graph's sizes in the captured batch."""
        return [graph.sizes for graph in self.graphs]

    def rows_with(self, largest: LargestBatch | None) -> list[int]:
        """Returns the sizes that are rows of the batch; `largest` as in `sizes_for`."""
        return [size for graph in self.graphs for size in graph.rows_with(largest)]

    def sizes_for(self, times: int = 1, largest: LargestBatch | None = None) -> list[SymbolValues]:
        """Returns each graph's sizes for a batch.

        Args:
            times: divisor of the batch's rows.
            largest: the batch to which the captured sizes are raised; None: they are kept.
        """
        return [graph.sizes_for(times, largest) for graph in self.graphs]

    def sizes_of(self, rows: int, tokens: int = 0) -> list[SymbolValues]:
        """Returns each graph's sizes for a batch of rows of that many tokens; 0: as many tokens as were captured."""
        return [graph.sizes_of(rows, tokens) for graph in self.graphs]

    def sizes_of_runs(self, sizes: Sequence[SymbolValues]) -> tuple[Tape, Sequence[SymbolValues]]:
        """Returns the tape for a batch, and the sizes of each of its calls.

        Args:
            sizes: each graph's values of the symbols that are sizes of the batch; the values of other symbols follow
                from the graphs before it.
        """
        graphs = self.graphs
        named_sizes = (
            (name, of_graph[symbol])
            for graph, of_graph in zip(graphs, sizes, strict=True)
            for symbol, name in graph.names.items()
            if symbol in of_graph
        )
        tape = self.tape.at(dict(named_sizes))
        schedules = [graph.timeline for graph in graphs if graph.timeline is not None]
        if len(tape.calls) == 1 or len(schedules) < len(graphs):
            return tape, [sizes[call.graph] for call in tape.calls]
        named = [
            {symbol: size for symbol, size in of_graph.items() if symbol in graph.names}
            for graph, of_graph in zip(graphs, sizes, strict=True)
        ]
        return resized(tape, schedules, self.first, named)

    def problem(
        self, sizes: Sequence[SymbolValues], frees_gradients: bool = False, with_conversions: bool = False
    ) -> TapeProblem:
        """Returns the graphs as one problem, for any plan.

        Args:
            sizes: see `sizes_of_runs`.
            frees_gradients: see `compose`.
            with_conversions: include the conversions, for plans that compress.
        """
        tape, runs = self._runs(
            sizes,
            lambda graph, values, _: graph.compressible_at(values) if with_conversions else graph.problem_at(values),
        )
        return problem_of_tape(tape.with_all_held(), runs, frees_gradients)

    def events(
        self, sizes: Sequence[SymbolValues], frees_gradients: bool = False, plans: Sequence[SavedNodes] = ()
    ) -> StepEvents:
        """Returns the events of a step.

        Args:
            sizes: see `sizes_of_runs`.
            frees_gradients: see `compose`.
            plans: an uncompressed plan for each run; empty: the applied plans.
        """
        tape, runs = self._runs(sizes, CapturedGraph.events_at, plans)
        if plans:
            pairs = zip(tape.calls, [plan.inputs for plan in plans], strict=True)
            calls = (replace(call, offloaded=own.offloaded, recomputed=own.recomputed) for call, own in pairs)
            tape = replace(tape, calls=tuple(calls))
        return compose(tape, runs, frees_gradients)

    def _runs(
        self,
        sizes: Sequence[SymbolValues],
        of_graph: Callable[[CapturedGraph, SymbolValues, SavedNodes | None], _T],
        plans: Sequence[SavedNodes] = (),
    ) -> tuple[Tape, tuple[_T, ...]]:
        """Returns the tape for a batch, and a value for each call, computed once for equal calls; see `events` on
        `plans`."""
        tape, of_runs = self.sizes_of_runs(sizes)
        made: dict[object, _T] = {}
        runs: list[_T] = []
        for call, values, plan in zip(tape.calls, of_runs, plans or (None,) * len(of_runs), strict=True):
            if (key := (call.graph, plan, tuple(values.items()))) not in made:
                made[key] = of_graph(self.graphs[call.graph], values, plan)
            runs.append(made[key])
        return tape, tuple(runs)

    def slower(self, factor: float) -> "CapturedForward":
        """Returns the forward with the seconds of all operators and conversions multiplied by a factor."""
        priced = self.priced([[each * factor for each in graph.costs.seconds] for graph in self.graphs])
        graphs = (
            graph
            if (own := graph.conversions) is None
            else replace(graph, conversions=own.priced(each * factor for each in own.seconds))
            for graph in priced.graphs
        )
        return replace(priced, graphs=tuple(graphs))

    def priced(self, seconds: Sequence[Sequence[float]]) -> "CapturedForward":
        """Returns the forward with other seconds for each graph's operators, for any batch size."""

        def problem_at(graph: CapturedGraph, own: Sequence[float], values: SymbolValues) -> Problem:
            problem = graph.problem_at(values)
            return replace(problem, seconds=tuple(own[: len(problem.names)]))

        graphs = zip(self.graphs, seconds, strict=True)
        return replace(
            self, graphs=tuple(replace(graph, problem_at=partial(problem_at, graph, own)) for graph, own in graphs)
        )
