"""What a solver reads of each graph of a forward, for questions about other plans than one; none is applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import Problem, problems_of
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import InternalProducer, Producer
from optimum_memopt.engines.compile.partition.producers.torch_default import TorchDefault
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.engines.compile.solver.offload import Host, host_of
from optimum_memopt.engines.compile.solver.plan import Plan
from optimum_memopt.engines.compile.solver.siblings import KnownGraph
from optimum_memopt.engines.compile.train.step_context import Step
from optimum_memopt.sizes import Budget


@dataclass(frozen=True)
class Recorded:
    """A graph of a forward.

    Attributes:
        graph: as numbers, for any sizes.
        host: where its activations may wait; None: nowhere.
        costs: where those are from.
        saved: numbers of the nodes that a plan saves; None: no plan is asked about.
    """

    graph: KnownGraph
    host: Host | None
    costs: str
    saved: tuple[int, ...] | None

    def saving(self) -> frozenset[int]:
        """What the forward saves under the plan."""
        return self.graph.problem().saving(self.saved or ())

    def with_rows(self, rows: int) -> Problem:
        """With so many rows in the batch, and the time that they take."""
        sizes: Mapping[sympy.Symbol, int] = self.graph.rows
        problem = self.graph.problem_at({**self.graph.sizes, **dict.fromkeys(sizes, rows)})
        before = max(sizes.values(), default=rows)
        return replace(problem, seconds=tuple(seconds * rows / before for seconds in problem.seconds))


@dataclass(frozen=True)
class RecordedForward(InternalProducer):
    """See `Producer`; applies torch's own partition.

    Attributes:
        step: asked once, with `budget`.
        costs: asked for each graph.
        plan: whose choices are recorded, too; it is not applied.
        budget: of a step.
        graphs: filled with those of the forward, in order.
        choices: filled with those of `plan`.
        steps: filled with the step around the graphs.
    """

    step: Callable[[Budget], Step] | None = None
    costs: Callable[[AnalyzedGraph], Costs] | None = None
    plan: Producer | None = None
    budget: Budget = field(default_factory=lambda: Budget("", 0))
    graphs: list[Recorded] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """Torch's own partition, after the graph was recorded."""
        assert self.step is not None and self.costs is not None
        if not earlier:
            self.steps[:] = [self.step(self.budget)]
            self.graphs.clear()
            self.choices.clear()
        costs, step = self.costs(graph), self.steps[0]
        problem_at = problems_of(graph, costs.seconds, costs.workspaces)
        known = KnownGraph(graph.signature, problem_at, graph.size_hints, graph.names)
        host = host_of(graph, step.link, step.host)
        self.graphs.append(Recorded(known, host, costs.source, self._saved(graph)))
        return TorchDefault().choose(graph, earlier)

    def solver(self, runs: Sequence[int], rows: int | None = None) -> MultiGraphSolver:
        """The graphs, to be solved.

        Args:
            runs: how often each has run.
            rows: of the batch; None: as many as it has.
        """
        problems = [recorded.graph.problem() if rows is None else recorded.with_rows(rows) for recorded in self.graphs]
        return MultiGraphSolver(problems, runs, hosts=[recorded.host for recorded in self.graphs])

    def plan_of(self, solver: MultiGraphSolver) -> Plan | None:
        """What `plan` takes; None where it is torch's own, or offloads.

        Args:
            solver: of the graphs as they were recorded.
        """
        is_plain = all(
            choice.torchs_graphs is None and len(choice.recomputed) == len(choice.candidates)
            for choice in self.choices
        )
        return solver.saving([graph.saving() for graph in self.graphs]) if self.choices and is_plain else None

    def _saved(self, graph: AnalyzedGraph) -> tuple[int, ...] | None:
        if self.plan is None:
            return None
        self.choices.append(self.plan.choose(graph, tuple(self.choices)))
        return tuple(graph.joint.order[node] for node in self.choices[-1].nodes_to_save)
