"""A captured joint graph, which can be queried for other plans, batch sizes and budgets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy

from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import offloads, roots_of
from optimum_memopt.engines.compile.graph.joint import is_chunked_loss
from optimum_memopt.engines.compile.graph.problem import Problem, problems_of
from optimum_memopt.engines.compile.graph.saved_activations import module_path
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, is_length, larger_sizes, rows_of
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents
from optimum_memopt.engines.compile.memory.schedule import Schedule
from optimum_memopt.engines.compile.memory.simulation import problem_events, simulate
from optimum_memopt.engines.compile.partition.choice import SavedNodes
from optimum_memopt.engines.compile.partition.conversions import Conversions
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """One joint graph of a training forward.

    Attributes:
        digest: the digest of the joint graph.
        names: names of the symbols that are sizes of inputs, such as `input_ids_dim0`.
        rows: rows of the plan table, by the name of the activation's root.
        analyzed: the analyzed graph, with the sizes of its first batch.
        plans: the plans chosen for it, the applied one first; empty before there is one.
        conversions: the conversions of activations that may be compressed; None: none may be.
    """

    digest: str
    problem_at: Callable[[SymbolValues], Problem]
    sizes: SymbolValues
    names: Mapping[sympy.Symbol, str]
    costs: Costs
    offloadable: frozenset[int]
    rows: Mapping[str, str]
    modules: Mapping[str, str]
    chunks_loss: bool
    analyzed: AnalyzedGraph
    plans: tuple[SavedNodes, ...] = ()
    partitioned: PartitionedGraph | None = None
    conversions: Conversions | None = None

    @property
    def row_symbols(self) -> dict[sympy.Symbol, int]:
        """Returns its sizes that are rows of the batch."""
        return rows_of(self.sizes, self.names)

    def rows_with(self, largest: LargestBatch | None) -> list[int]:
        """Returns its sizes that are rows of the batch, raised to the rows of the run's largest batch."""
        return list(rows_of(larger_sizes(self.sizes, self.names, largest), self.names).values())

    def sizes_for(self, times: int = 1, largest: LargestBatch | None = None) -> dict[sympy.Symbol, int]:
        """Returns its sizes for its batch, or for an n-th of its rows; see `CapturedForward.sizes_for`."""
        sizes = larger_sizes(self.sizes, self.names, largest)
        return {**sizes, **{symbol: max(1, size // times) for symbol, size in rows_of(sizes, self.names).items()}}

    def sizes_of(self, rows: int, tokens: int) -> SymbolValues:
        """Returns the symbols' values for a batch of rows of that many tokens; 0: as many tokens as were captured."""
        of_tokens = [symbol for symbol in self.sizes if tokens and is_length(self.names.get(symbol, ""))]
        return {**self.sizes, **dict.fromkeys(of_tokens, tokens), **dict.fromkeys(self.row_symbols, rows)}

    @property
    def timeline(self) -> Schedule | None:
        """Returns its memory over time under the applied choice; None if it was not partitioned or is not known."""
        return None if self.partitioned is None else self.partitioned.timeline

    def events_at(self, values: SymbolValues, plan: SavedNodes | None = None) -> GraphEvents:
        """Returns the events of its forward and backward for these sizes.

        Args:
            plan: an uncompressed plan; None: the applied one.
        """
        plan = plan or self.plans[0]
        if plan.compressed and self.timeline is not None:
            # The problem has no conversions.
            return self.timeline.at(values)
        problem = self.problem_at(values)
        saved = simulate(problem, problem.saving(plan.saved)).saved
        return problem_events(problem, saved, self.rows, plan.offloaded)

    def compressible_at(self, values: SymbolValues) -> Problem:
        """Returns its problem for these sizes, with conversions."""
        problem = self.problem_at(values)
        return problem if self.conversions is None else self.conversions.added_to(problem, values)


def captured_graph(graph: AnalyzedGraph, costs: Costs, conversions: Conversions | None = None) -> CapturedGraph:
    """Captures an analyzed graph, before a plan is chosen for it."""
    joint = graph.joint
    rows: dict[str, str] = {}
    for candidate in graph.candidates:
        rows.setdefault(candidate.activation.root.name, candidate.row)
    return CapturedGraph(
        graph.digest,
        problems_of(graph, costs.seconds, costs.workspaces),
        graph.size_hints,
        graph.names,
        costs,
        offloadable=frozenset(map(joint.order.__getitem__, roots_of(offloads(graph.candidates)))),
        rows=rows,
        modules={node.name: module_path(node) for node in joint.nodes if node.op == "call_function"},
        chunks_loss=any(map(is_chunked_loss, joint.nodes)),
        analyzed=graph,
        conversions=conversions,
    )


def no_costs(graph: AnalyzedGraph) -> Costs:
    """Returns costs of zero seconds, for callers that need bytes only."""
    return Costs((0.0,) * len(graph.joint.nodes), "no")
