"""Finds the micro-batch that fits where the asked one does not, without tracing anything again."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from optimum_memopt.engines.compile.budget.mixed import Host, is_within
from optimum_memopt.engines.compile.budget.problem import OtherGraphs
from optimum_memopt.engines.compile.budget.several_graphs import KnownGraph
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
    graph: KnownGraph,
    others_at: Callable[[int], OtherGraphs],
    outside: Footprint,
    budget: int,
    host: Host | None,
) -> SmallerBatch | None:
    """The largest half, quarter and so on of a batch for which a plan fits; None where there is none for one row.

    Args:
        graph: that does not fit.
        others_at: other graphs of the forward with one of so many parts of the rows.
        outside: what the step holds beside its graphs.
        budget: bytes that the step's peak must not pass.
        host: where activations may wait; None: nowhere.
    """
    rows = set(graph.rows.values())
    if len(rows) != 1:
        return None
    (whole,) = rows
    times = 2
    while whole % times == 0:
        # Gradients of the earlier micro-batches are there while a later one runs.
        step = replace(outside, batch=outside.batch // times, accumulated=outside.gradients)
        allowed = step.activations_within(budget)
        if is_within(Solver(graph.problem(times)).among(others_at(times)), allowed, host):
            return SmallerBatch(whole // times, times)
        times *= 2
    return None
