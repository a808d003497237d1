"""The most rows of a batch for which there is a plan within a budget; none is applied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.in_step import Step
from optimum_memopt.engines.compile.budget.largest_sizes import rows_of
from optimum_memopt.engines.compile.budget.mixed import host_of, is_within
from optimum_memopt.engines.compile.budget.problem import problems_of
from optimum_memopt.engines.compile.budget.solve import Solver
from optimum_memopt.engines.compile.choice import Choice
from optimum_memopt.engines.compile.producers.producer import InternalProducer
from optimum_memopt.engines.compile.producers.torch_default import TorchDefault
from optimum_memopt.sizes import Budget

# What an allocator's blocks take under a plan beyond what they take without one; not tuned.
_BLOCKS = 0.005


@dataclass(frozen=True)
class LargestRows(InternalProducer):
    """See `Producer`; applies torch's own partition.

    Attributes:
        search: given whether a number of rows fits, finds the largest.
        bytes_for: what the peak of a step with so many rows may be.
        step: asked for each graph; the budget that it is given counts for nothing.
        costs: asked for each graph.
        found: filled with what `search` found in the first graph.
    """

    search: Callable[[Callable[[int], bool]], int]
    bytes_for: Callable[[int], int]
    step: Callable[[Budget], Step] | None = None
    costs: Callable[[AnalyzedGraph], Costs] | None = None
    found: list[int] = field(default_factory=list)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """Torch's own partition, after the search in the first graph."""
        assert self.step is not None and self.costs is not None
        if not earlier:
            fits = _fitting(graph, self.costs(graph), self.step(Budget("", 0)))
            self.found.append(self.search(lambda rows: fits(rows, self.bytes_for(rows))))
        return TorchDefault().choose(graph, earlier)


def _fitting(graph: AnalyzedGraph, costs: Costs, step: Step) -> Callable[[int, int], bool]:
    """Tells whether a plan is found with which a step with so many rows holds at most so many bytes."""
    first = rows_of(graph.size_hints, graph.names)
    problem_at = problems_of(graph, costs.seconds, costs.workspaces)
    host = host_of(graph, step.link, step.host)

    def fits(rows: int, most: int) -> bool:
        before = max(first.values(), default=rows)
        outside = replace(step.outside, batch=step.outside.batch * rows // before)
        if replace(outside, activations=0).peak > most:
            return False
        problem = problem_at({**graph.size_hints, **dict.fromkeys(first, rows)})
        seconds = tuple(one * rows / before for one in problem.seconds)
        allowed = int(outside.activations_within(most) * (1 - _BLOCKS))
        return is_within(Solver(replace(problem, seconds=seconds)), allowed, host)

    return fits
