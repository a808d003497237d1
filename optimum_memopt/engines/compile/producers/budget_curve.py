"""What budgets cost: the plan of several budgets, between the lowest peak and everything saved; none is applied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.curve import point_of_budget, point_of_plan, points_of, solved
from optimum_memopt.engines.compile.budget.in_step import Step
from optimum_memopt.engines.compile.budget.mixed import Host, host_of
from optimum_memopt.engines.compile.budget.problem import problem_of
from optimum_memopt.engines.compile.budget.solve import Solver
from optimum_memopt.engines.compile.choice import Choice
from optimum_memopt.engines.compile.producers.budget import FromBudget
from optimum_memopt.engines.compile.producers.producer import InternalProducer, Producer
from optimum_memopt.engines.compile.producers.torch_default import TorchDefault
from optimum_memopt.engines.estimates import CurvePoint
from optimum_memopt.sizes import Budget


@dataclass(frozen=True)
class BudgetCurve(InternalProducer):
    """See `Producer`; applies torch's own partition.

    Attributes:
        step: asked for each graph, with the budget of `plan`, where that has one.
        costs: asked for each graph.
        plan: a plan whose place is found, too; it is not applied.
        points: filled with those of the first graph, from the lowest peak to the highest.
        source: filled with where the costs are from.
        chosen: filled with the place of `plan`, unless it offloads or is torch's own.
    """

    step: Callable[[Budget], Step] | None = None
    costs: Callable[[AnalyzedGraph], Costs] | None = None
    plan: Producer | None = None
    points: list[CurvePoint] = field(default_factory=list)
    source: list[str] = field(default_factory=list)
    chosen: list[CurvePoint] = field(default_factory=list)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """Torch's own partition, after the points of the first graph were found."""
        assert self.step is not None and self.costs is not None
        if not earlier:
            costs = self.costs(graph)
            # The first budget that it is given counts.
            step = self.step(self.plan.budget if isinstance(self.plan, FromBudget) else Budget("", 0))
            solver = Solver(problem_of(graph, costs.seconds, costs.workspaces))
            self.source.append(costs.source)
            host = host_of(graph, step.link, step.host)
            self.points.extend(points_of(solved(solver, host), step.outside))
            if (place := self._place(graph, solver, step, host)) is not None:
                self.chosen.append(place)
        return TorchDefault().choose(graph, earlier)

    def _place(self, graph: AnalyzedGraph, solver: Solver, step: Step, host: Host | None) -> CurvePoint | None:
        if isinstance(self.plan, FromBudget):
            return point_of_budget(solver, step.outside, step.bytes, host)
        if self.plan is None or isinstance(self.plan, TorchDefault):
            return None
        choice = self.plan.choose(graph, ())
        if choice.torchs_graphs is not None or len(choice.recomputed) < len(choice.candidates):
            return None
        return point_of_plan(solver, step.outside, [graph.joint.order[node] for node in choice.nodes_to_save])
