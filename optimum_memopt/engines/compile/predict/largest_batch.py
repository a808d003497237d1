"""The largest batch whose step is within a budget, by prediction: nothing is run, and nothing crashes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.partition.producers.recorded import RecordedForward
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, Traced
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.train.step_budget import bounded_bytes
from optimum_memopt.errors import MemOptError
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
    memory = step.capacity
    allowed = budget.on_device(memory.total, memory.available)
    start = step.workload.batch_size
    if step.selection.budget is None:
        return _largest_of(step.trace(dynamic=True), allowed, start)
    forward = RecordedForward()
    traced = replace(step, selection=Selection()).trace(dynamic=True, producer=forward)
    predictor = _predictor(traced)

    def bytes_for(rows: int) -> int:
        """Less what the blocks of the allocator take beyond what tensors ask for, without a plan."""
        return allowed * predictor.footprint(batch_size=rows).peak // bounded_bytes(predictor, batch_size=rows)

    rows = largest(lambda rows: _is_within(forward, predictor.runs, rows, bytes_for(rows)), start)
    traced.engine.detach()
    return rows


def _is_within(forward: RecordedForward, runs: Sequence[int], rows: int, most: int) -> bool:
    """Whether plans are found with which a step with so many rows holds at most so many bytes."""
    outside = forward.steps[0].outside
    before = max(forward.graphs[0].graph.rows.values(), default=rows)
    outside = replace(outside, batch=outside.batch * rows // before)
    if replace(outside, activations=0).peak > most:
        return False
    return forward.solver(runs, rows).fits(int(outside.activations_within(most) * (1 - _BLOCKS)))


def _largest_of(traced: Traced, allowed: int, start: int) -> int:
    predictor = _predictor(traced)
    rows = largest(lambda rows: bounded_bytes(predictor, batch_size=rows) <= allowed, start)
    traced.engine.detach()
    return rows


def _predictor(traced: Traced) -> StepMemoryPredictor:
    if (predictor := traced.engine.predictor) is None:
        table = traced.engine.plans()
        raise MemOptError("; ".join(table.header if table is not None else ()))
    return predictor


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
