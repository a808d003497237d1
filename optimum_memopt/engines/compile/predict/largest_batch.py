"""The largest batch whose step is within a budget, by prediction: nothing is run, and nothing crashes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep
from optimum_memopt.engines.compile.predict.planner import bounded_bytes
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.sizes import Budget

# Far beyond what one step trains on.
_MOST_ROWS = 2**24
# What an allocator's blocks take under a plan beyond what they take without one; not tuned.
_BLOCKS = 0.005


def largest_batch(step: PlannedStep, budget: Budget) -> int:
    """The most rows with which a step's peak is within a budget.

    A config, a level or a plan file is traced once, with symbols for its sizes. Where a budget chooses the plan, each
    number of rows may have a plan of its own.

    Args:
        step: its workload's batch is where the search begins.
        budget: of the peak; blocks of torch's allocator on CUDA.

    Returns:
        0 where one row is too many.

    Raises:
        MemOptError: as for `estimate`, or a batch whose rows are no symbol of the graph.
    """
    # A single row would be a constant of the graph.
    step = replace(step, workload=step.workload.with_rows(max(2, step.workload.batch_size)))
    allowed = budget.on_device(step.capacity.total, step.capacity.available)
    start = step.workload.batch_size
    if step.selection.budget is None:
        predictor = step.trace(dynamic=True).predicted
        return largest(lambda rows: bounded_bytes(predictor, batch_size=rows) <= allowed, start)
    step = replace(step, selection=Selection())
    traced = step.trace(True, step.costs_of)
    predictor, context = traced.predicted, step.context(traced, budget)

    def is_within(rows: int) -> bool:
        """Less what the blocks of the allocator take beyond what tensors ask for, without a plan."""
        limit = allowed * predictor.footprint(batch_size=rows).peak // bounded_bytes(predictor, batch_size=rows)
        return _fits(traced.graphs, replace(context, limit=limit), rows)

    return largest(is_within, start)


def _fits(graphs: Sequence[CapturedGraph], step: StepContext, rows: int) -> bool:
    """Whether a plan is found for a step with so many rows, of which the context's batch has those of the graphs."""
    before = max(graphs[0].row_symbols.values(), default=rows)
    step = replace(step, fixed=replace(step.fixed, batch=step.fixed.batch * rows // before))
    if step.footprint(0).peak > step.limit:
        return False
    solver = MultiGraphSolver(
        [graph.problem_of_rows(rows) for graph in graphs],
        [graph.runs for graph in graphs],
        hosts=[graph.host(step) for graph in graphs],
    )
    return solver.fits(int(step.allowed * (1 - _BLOCKS)))


def largest(fits: Callable[[int], bool], start: int, limit: int = _MOST_ROWS) -> int:
    """The largest number that fits, where all smaller ones do too. Pure.

    Args:
        fits: whether a number does.
        start: where to look first, from 1 on.
        limit: the largest number that is looked at.

    Returns:
        0 where 1 does not fit.
    """
    fits = lru_cache(None)(fits)
    low, high = 0, min(start, limit)
    while fits(high):
        low = high
        if high == limit:
            return limit
        high = min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
