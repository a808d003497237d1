"""Finds the micro-batch that fits where the asked one does not, without tracing anything again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.largest_sizes import is_rows
from optimum_memopt.engines.compile.budget.mixed import Host, is_within
from optimum_memopt.engines.compile.budget.problem import problems_of
from optimum_memopt.engines.compile.budget.solve import Solver
from optimum_memopt.engines.compile.memory.footprint import Footprint


@dataclass(frozen=True)
class SmallerBatch:
    """A micro-batch that fits.

    Attributes:
        rows: of the micro-batch.
        times: gradient accumulation that keeps the rows of an optimizer step.
    """

    rows: int
    times: int


def smaller_batch(
    graph: AnalyzedGraph,
    names: Mapping[sympy.Symbol, str],
    costs: Costs,
    outside: Footprint,
    budget: int,
    host: Host | None,
) -> SmallerBatch | None:
    """The largest half, quarter and so on of a batch for which a plan fits; None where there is none for one row.

    Args:
        graph: read, not changed.
        names: of the graph's symbols, `input_ids_dim0`.
        costs: of its operators.
        outside: what the step holds beside the graph.
        budget: bytes that the step's peak must not pass.
        host: where activations may wait; None: nowhere.
    """
    rows = {symbol: size for symbol, size in graph.size_hints.items() if is_rows(names.get(symbol, ""))}
    if len(set(rows.values())) != 1:
        return None
    (whole,) = set(rows.values())
    problem_at = problems_of(graph, costs.seconds, costs.workspaces)
    times = 2
    while whole % times == 0:
        hints = {**graph.size_hints, **dict.fromkeys(rows, whole // times)}
        # Gradients of the earlier micro-batches are there while a later one runs.
        step = replace(outside, batch=outside.batch // times, accumulated=outside.gradients)
        allowed = step.activations_within(budget)
        if is_within(Solver(problem_at(hints)), allowed, host):
            return SmallerBatch(whole // times, times)
        times *= 2
    return None
