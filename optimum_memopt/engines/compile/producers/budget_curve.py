"""What budgets cost: the plan of several budgets, between the lowest peak and everything saved; none is applied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile.analysis.candidates import Candidate
from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.in_step import Step
from optimum_memopt.engines.compile.budget.problem import problem_of
from optimum_memopt.engines.compile.budget.solve import Solution, Solver
from optimum_memopt.engines.compile.choice import Choice
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.producers.torch_default import TorchDefault
from optimum_memopt.engines.estimates import CurvePoint
from optimum_memopt.plans.matching import Matched
from optimum_memopt.sizes import Budget

POINTS = 10


@dataclass(frozen=True)
class BudgetCurve:
    """See `Producer`; applies torch's own partition.

    Attributes:
        step: asked for each graph; the budget that it is given counts for nothing.
        costs: asked for each graph.
        points: filled with those of the first graph, from the lowest peak to the highest.
        source: filled with where the costs are from.
    """

    step: Callable[[Budget], Step] | None = None
    costs: Callable[[AnalyzedGraph], Costs] | None = None
    points: list[CurvePoint] = field(default_factory=list)
    source: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, selection: Selection) -> "BudgetCurve | None":
        """Nobody selects it."""
        return None

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """Nothing is asked for by name."""
        return Matched()

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """Torch's own partition, after the points of the first graph were found."""
        assert self.step is not None and self.costs is not None
        if not earlier:
            costs = self.costs(graph)
            outside = self.step(Budget("", 0)).outside
            self.source.append(costs.source)
            self.points.extend(budget_curve(Solver(problem_of(graph, costs.seconds)), outside))
        return TorchDefault().choose(graph, earlier)


def budget_curve(solver: Solver, outside: Footprint, count: int = POINTS) -> list[CurvePoint]:
    """The plans of `count` budgets at equal distances, from the lowest peak to that of everything saved. Pure.

    Args:
        solver: of a joint graph.
        outside: what a step holds beside the graph.
        count: of budgets.
    """
    low, high = solver.lowest.peak, solver.everything.peak
    points = []
    for number in range(count):
        allowed = low + (high - low) * number // (count - 1)
        found = solver.solve(allowed)
        assert isinstance(found, Solution)
        budget, peak = (replace(outside, activations=size).peak for size in (allowed, found.peak))
        points.append(CurvePoint(budget, peak, found.extra_seconds, found.seconds))
    return points
