"""Estimates the plan table and peak of a model traced on fake tensors, without weights, data or GPU memory; and
compares ways to train it: plain PyTorch, Trainer's checkpointing, and this engine's plans."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from optimum_memopt.compat.transformers import attention_implementation, checkpointing_flag, is_encoder_decoder
from optimum_memopt.engines.api.predictions import (
    BatchPoint,
    EagerSettings,
    Frontier,
    StepEstimate,
    Technique,
    Way,
    Workload,
)
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.costs.times import update_times
from optimum_memopt.engines.compile.graph.symbols import input_sizes, plain_sizes
from optimum_memopt.engines.compile.memory.footprint import trainable_of
from optimum_memopt.engines.compile.partition.captured_graph import no_costs
from optimum_memopt.engines.compile.partition.producers.budget import cheapest
from optimum_memopt.engines.compile.partition.producers.producer import TorchDefault
from optimum_memopt.engines.compile.partition.producers.stated import FromLevel
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.predict.plain_step import PlainStep, plain_steps
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, TracedStep
from optimum_memopt.engines.compile.predict.step_limit import StepLimit, TracedBatch, bounded_bytes
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.solver import Infeasible
from optimum_memopt.engines.torch_compat.trace_fixes import one_at_a_time
from optimum_memopt.errors import DoesNotFitError, MemOptError
from optimum_memopt.logs import watched
from optimum_memopt.memory.optimizers import PlannedOptimizer
from optimum_memopt.plans.table import PlanTable, canonical_symbols
from optimum_memopt.sizes import MIB, Budget
from optimum_memopt.step_settings import THIS_MACHINE, StepSpec

_PLAIN = Technique("plain PyTorch", is_own=False)
_NO_PLAN = Technique("compile engine, no plan", ("--memory_opt_engine compile",))
_LEVEL_1 = Technique("compile engine, level 1", ("--memory_opt_level 1",))


@one_at_a_time
def plain_ways(workload: Workload, spec: StepSpec) -> tuple[Way, ...]:
    """Returns plain PyTorch, and Trainer's checkpointing of every layer.

    Raises:
        MemOptError: the device or optimizer is unknown, or the model cannot be built.
    """
    plain = EagerSettings(keeps_outputs=spec.keep_outputs)
    technique = Technique("Trainer's checkpointing", (checkpointing_flag(),), is_own=False)
    with plain_steps(workload, spec) as run:
        with watched("simulating plain PyTorch"):
            step = run(plain)
        try:
            with watched("simulating Trainer's checkpointing"):
                checkpointing = run(replace(plain, checkpoints=1))
        except MemOptError as error:
            return _way(_PLAIN, step), Way(technique, note=str(error))
    return _way(_PLAIN, step), _way(technique, checkpointing)


def _way(plan: Technique, step: PlainStep) -> Way:
    blocks = step.allocator
    return Way(
        plan,
        step.peak if blocks is None else max(step.peak, blocks.allocated),
        None if blocks is None else blocks.reserved,
        step.seconds,
        timeline=step.timeline,
    )


def engine_ways(step: PlannedStep, traced: TracedStep) -> tuple[Way, ...]:
    """Returns this engine without a plan, under level 1, and under the selection.

    Args:
        traced: a step whose forward has the choices of these three, that of the selection first.
    """
    selection = step.selection
    plans = [(1, _NO_PLAN), (2, _LEVEL_1)]
    if selection.budget is not None:
        name, flags = "compile engine, budget", [f"--memory_opt_budget {selection.budget.text}"]
        if selection.compress is not None:
            name, flags = f"{name} with {selection.compress}", [*flags, f"--memory_opt_compress {selection.compress}"]
        plans.append((0, Technique(name, tuple(flags))))
    elif selection.plan is not None:
        plans.append((0, Technique("compile engine, plan file", ("--memory_opt_plan",))))
    elif selection.config or selection.level > 1 or selection.compress is not None:
        plans.append((0, _stated(selection)))
    context, optimizer = step.context(traced, Budget("", 0)), traced.run.optimizer
    assert isinstance(optimizer, PlannedOptimizer)
    trained = trainable_of(traced.model, traced.forward.untrained)
    update = update_times(trained, optimizer, step.here, step.target)

    def way(index: int, plan: Technique) -> Way:
        model = StepModel.of(traced.forward.planned_by(index), context)
        events = model.events()
        around = model.footprint(events.peak())
        blocks = traced.predicted.blocks_of(events, around)
        return Way(
            replace(plan, chunks_loss=model.forward.chunks_loss),
            around.peak if blocks is None else max(around.peak, blocks.allocated),
            None if blocks is None else blocks.reserved,
            update.step(model.seconds(), step.spec.gradient_accumulation_steps),
        )

    return tuple(way(index, plan) for index, plan in plans)


def _stated(selection: Selection) -> Technique:
    """Returns the technique of a config, a level or no plan."""
    name, flags = "no plan", list(_NO_PLAN.flags)
    if selection.config:
        name, flags = "config", [f"--memory_opt_config {selection.config}"]
    elif selection.level:
        name, flags = f"level {selection.level}", [f"--memory_opt_level {selection.level}"]
    if selection.compress is not None:
        name, flags = f"{name} in {selection.compress}", [*flags, f"--memory_opt_compress {selection.compress}"]
    return Technique(f"compile engine, {name}", tuple(flags))


# How exact a prediction is, by compiler; the figures of inductor are in docs/compile.md.
_EXACT = {
    "aot_eager": "Exact with --memory_opt_compiler aot_eager, except for the header's remarks in parentheses; with "
    "inductor, measured peaks were up to a third lower or a fifth higher",
    "inductor": "inductor reorders operators: measured peaks were up to a third lower or a fifth higher; a training "
    "run predicts the peak from inductor's own programs",
}


@one_at_a_time
def estimate(
    workload: Workload,
    selection: Selection,
    spec: StepSpec = THIS_MACHINE,
    *,
    symbolic: bool = False,
    with_curve: bool = False,
    with_ways: bool = False,
    batch_sizes: Sequence[int] = (),
) -> StepEstimate:
    """Trace one training forward and its backward on fake tensors, and partition them with the compile engine.

    Args:
        spec: settings of the step. Operators are predicted in the graph's order, for inductor too.
        symbolic: keep sizes as symbols, so that savings are formulas; several times slower.
        batch_sizes: also predict a step for each of these batch sizes, from one trace with the workload's batch, which
            is the largest of them; sizes stay symbols.

    Raises:
        MemOptError: the device or optimizer is unknown, sizes or plans are bad, or the model's forward depends on
            values of its tensors.
    """
    step = PlannedStep(workload, selection, spec)
    symbolic = symbolic or len(batch_sizes) > 1
    costs = step.costs_of if with_curve or with_ways else no_costs
    compared = (TorchDefault(), FromLevel(1)) if with_ways else ()
    try:
        traced = step.trace(symbolic, costs, compared)
    except DoesNotFitError:
        if symbolic:
            raise
        # With symbols, the error names a smaller batch that fits.
        traced = step.trace(True, costs, compared)
    table, predictor = traced.shown.table, traced.predicted
    footprint, blocks = predictor.footprint(), predictor.allocator_peak()
    if not symbolic:
        table = _without_formulas(table, traced.batch, is_encoder_decoder(traced.model))
    batches = tuple(_batch_point(predictor, size) for size in batch_sizes) if len(batch_sizes) > 1 else ()
    sizes = {"sizes": dict(table.symbols), "device": step.device_name}
    plan = traced.shown.plan_file
    attention = attention_implementation(getattr(traced.model, "config", None)) or "eager"
    return StepEstimate(
        table=table,
        parts=asdict(footprint),
        peak_mib=footprint.peak / MIB,
        device=step.device_name,
        compiler=step.compiled_by,
        attention=attention,
        assumes=f"Predicted, not run: attention is {attention}, with the kernel that torch selects on "
        f"{step.device_name}; other devices may use a different one. {_EXACT[step.compiled_by]}",
        plan=replace(plan, solved_for={**plan.solved_for, **sizes}),
        frontier=_frontier(traced, step) if with_curve else None,
        batches=batches,
        ways=engine_ways(step, traced) if with_ways else (),
        timeline=predictor.timeline(),
        allocated=blocks.allocated if blocks is not None else None,
        reserved=blocks.reserved if blocks is not None else None,
        capacity=step.capacity,
    )


def _frontier(traced: TracedStep, step: PlannedStep) -> Frontier:
    """Returns the time-memory frontier of budgets, with the selection marked."""
    forward, budget = traced.forward, step.selection.budget
    model = StepModel.of(forward, step.context(traced, budget or Budget("", 0)))
    if budget is not None:
        with contextlib.suppress(Infeasible):
            return model.frontier(model.solver.cheapest(model.context.allowed), model.context.limit)
    elif forward.tape == forward.tape.with_all_held() and not any(
        graph.plans[0].is_by_torch or graph.plans[0].offloaded or graph.plans[0].compressed for graph in forward.graphs
    ):
        runs = zip(model.problem.runs, forward.tape.calls, strict=True)
        saved = [problem.saving(forward.graphs[call.graph].plans[0].saved) for problem, call in runs]
        return model.frontier(model.solver.saving(saved))
    return model.frontier()


def _batch_point(predictor: StepMemoryPredictor, batch_size: int) -> BatchPoint:
    footprint = predictor.footprint(batch_size=batch_size)
    blocks = predictor.allocator_peak(batch_size=batch_size)
    saved = predictor.saved(plain_sizes(predictor.first, batch_size, None))
    allocated, reserved = (blocks.allocated, blocks.reserved) if blocks is not None else (None, None)
    return BatchPoint(batch_size, footprint.peak, footprint.activations, saved, allocated, reserved)


def _without_formulas(table: PlanTable, batch: Mapping[str, Any], is_encoder_decoder: bool) -> PlanTable:
    """Returns the table without formulas, since sizes are fixed; symbols are named after the batch's sizes."""
    sizes = input_sizes(batch)
    canonical = canonical_symbols(sizes, is_encoder_decoder)
    return replace(
        table,
        plans=tuple(replace(plan, saving_symbolic="") for plan in table.plans),
        symbols={canonical[name]: size for name, size in sizes.items()},
    )


# Upper bound of the search, far beyond the rows of any step.
_MOST_ROWS = 2**24
# Share by which the allocator's blocks waste more under a plan than without one; not tuned.
_WASTE_OF_PLANS = 0.005
# Percent of the rows to try next if their plan does not fit in the allocator's blocks.
_FEWER = 99


@one_at_a_time
def largest_batch(workload: Workload, selection: Selection, spec: StepSpec, budget: Budget) -> int:
    """Returns the largest number of rows with which a step's peak is within a budget.

    A config, a level or a plan file is traced once, with symbols for its sizes. If a budget chooses the plan, each
    number of rows may have a plan of its own.

    Args:
        workload: the search begins at the rows of its batch.

    Returns:
        The number of rows; 0 if one row is too many.

    Raises:
        MemOptError: as for `estimate`, or the batch's rows are not a symbol of the graph.
    """
    # A single row would be a constant of the graph.
    start = max(2, workload.batch_size)
    is_chosen = selection.budget is not None
    step = PlannedStep(workload.with_rows(start), Selection() if is_chosen else selection, spec)
    allowed = budget.on_device(step.capacity.total, step.capacity.available)
    if not is_chosen:
        traced = step.trace(dynamic=True)
        # `traced` keeps the model alive.
        return largest(lambda rows: bounded_bytes(traced.predicted, batch_size=rows) <= allowed, start)
    traced = step.trace(True, step.costs_of, compresses=selection.compress is not None)
    limit = StepLimit(traced.model, budget, lambda: traced.run, step.target)
    context = limit.context(TracedBatch(traced.batch, traced.forward.untrained))
    predictor, model = traced.predicted, StepModel.of(traced.forward, context)

    def is_likely(rows: int) -> bool:
        """Returns whether a plan fits, if its blocks exceed its tensors by the same ratio as without a plan."""
        less = allowed * predictor.footprint(batch_size=rows).peak // bounded_bytes(predictor, batch_size=rows)
        of_rows = model.around(replace(context, limit=less)).with_rows(rows)
        within = int(of_rows.context.allowed * (1 - _WASTE_OF_PLANS))
        return of_rows.peak(0) <= less and of_rows.solver.fits(within)

    def has_plan(rows: int) -> bool:
        try:
            limit.for_another(None).solve(model.with_rows(rows), lambda step: cheapest(step)[1])
        except Infeasible:
            return False
        return True

    rows = largest(is_likely, start)
    # Small tensors waste more of their blocks than estimated.
    while limit.is_on_cuda and rows and not has_plan(rows):
        rows = rows * _FEWER // 100
    return rows


def largest(fits: Callable[[int], bool], start: int, limit: int = _MOST_ROWS) -> int:
    """Returns the largest number that fits, given that all smaller ones fit too; 0 if 1 does not fit. Pure."""
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
