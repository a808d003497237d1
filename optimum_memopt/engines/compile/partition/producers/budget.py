"""The producer of a budget: finds the cheapest recompute, offload and, if allowed, compression to fp8 with which the
peak of a step is within it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimum_memopt.engines.api.run import ALONE, LargestBatch
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.graph.symbols import is_length
from optimum_memopt.engines.compile.memory.footprint import StepContext
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem
from optimum_memopt.engines.compile.partition.choice import Choice, InputsPlan, SavedNodes
from optimum_memopt.engines.compile.partition.producers.producer import INSTEAD, Producer, SolvedForward
from optimum_memopt.engines.compile.partition.producers.stated import FromLevel
from optimum_memopt.engines.compile.partition.step_model import StepModel
from optimum_memopt.engines.compile.solver.solver import ExtraByLength, Infeasible, Plan, extra_by_length
from optimum_memopt.errors import DoesNotFitError, MemOptError, UnsupportedModelError
from optimum_memopt.sizes import Budget, gib_text, text_of_at_least

_WORTH_NAMING = 2**20


@dataclass(frozen=True)
class FromBudget(Producer):
    """The producer of `--memory_opt_budget`."""

    bound: Budget
    compresses: bool = False

    def refusal(self, why: str) -> MemOptError | None:
        text = f"--memory_opt_budget {self.bound.text}: {why}, so that nothing can be planned"
        return UnsupportedModelError(text, f"without a budget {INSTEAD}")

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        return FromLevel(1).choose(graph)

    def solve(self, step: StepModel, with_curve: bool = False, with_lengths: bool = False) -> SolvedForward:
        """Finds the fastest plan that fits; torch's own partition if that fits too and nothing must be recomputed."""
        context = step.context
        try:
            plan, solved = cheapest(step)
        except Infeasible as infeasible:
            lowest = step.peak(infeasible.peak) + context.margin + context.aside
            raise self._does_not_fit(context, lowest, dict(infeasible.holds), _suggestion(step, lowest)) from None
        frontier = step.frontier(plan, context.limit) if with_curve else None
        return replace(solved, frontier=frontier, by_length=_by_length(step, plan) if with_lengths else None)

    def _does_not_fit(self, step: StepContext, peak: int, holds: dict[str, int], suggestion: str) -> DoesNotFitError:
        fixed, is_final = step.fixed, not _fits_without_activations(step)
        parts = {
            "parameters": fixed.parameters + fixed.buffers,
            "optimizer states": fixed.optimizer,
            "accumulated gradients": fixed.accumulated,
            "the batch" if step.micro_batches < 2 else f"{step.micro_batches} micro-batches": fixed.batch,
            "the process": fixed.constant,
            **({"gradients and the optimizer's step": fixed.gradients + fixed.step} if is_final else holds),
        }
        largest = sorted(parts.items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} {gib_text(size)}" for name, size in largest if size >= _WORTH_NAMING)
        held = f"largest: {named}; " if named else ""
        batch = f" (batch {step.largest}, {_longest(step.largest)})" if step.largest is not None else ""
        among = " among several forwards before one backward" if step.others != ALONE else ""
        allowed = "full recompute and fp8" if self.compresses else "full recompute"
        # How much offload could take off that peak is not known, only that it is not enough.
        offload = ", and offload does not close the gap" if step.link else ""
        return DoesNotFitError(
            f"--memory_opt_budget {self.bound.text}: infeasible: even with {allowed} the step peaks at "
            f"{text_of_at_least(peak)}{batch}{among}, over {gib_text(step.limit)}{offload}; {held}{suggestion}",
            peak,
            is_final,
        )


def _longest(largest: LargestBatch) -> str:
    return f"the {largest.flattened} longest rows in one" if largest.flattened else "the longest row"


def cheapest(step: StepModel) -> tuple[Plan, SolvedForward]:
    """Finds the fastest plan that fits; torch's own partition if that fits too and nothing must be recomputed.

    Raises:
        Infeasible: no plan fits.
    """
    context = step.context
    plan = step.solver.cheapest(context.allowed)
    why, saved = _chosen(step, plan)
    return plan, SolvedForward(why, saved, max(0, context.allowed - plan.peak), plan.segments)


def _chosen(step: StepModel, plan: Plan) -> tuple[str, dict[tuple[str, str, int], SavedNodes]]:
    """Returns why a plan was chosen, and the nodes that each run saves under it."""
    forward, context, solver = step.forward, step.context, step.solver
    sizes = f" for batches up to {context.largest}" if list(step.sizes) != forward.first else ""
    margin = f" less a margin of {gib_text(context.margin)}" if context.margin else ""
    others = context.others.earlier
    among = f", and for other forwards that save {others:.3g} times as much" if others else ""
    why = f"budget {gib_text(context.limit)}{margin}{sizes}{among}"
    if not plan.segments and solver.everything <= context.allowed and step.fits_by_torch:
        own = dict.fromkeys(forward.run_keys, SavedNodes((), is_by_torch=True))
        return f"{why}: fits without a plan, torch's own partition", own
    nodes = saved_nodes(solver.forward, plan)
    return f"{why}{_gain(plan, forward.costs)}", dict(zip(forward.run_keys, nodes, strict=True))


def saved_nodes(forward: TapeProblem, plan: Plan) -> tuple[SavedNodes, ...]:
    """Converts a plan to the nodes that each run saves."""
    sources = {link.source for link in plan.segments}
    nodes: list[SavedNodes] = []
    kinds = forward.of_runs(plan.saved), forward.of_places(plan.offloaded), forward.of_places(plan.compressed)
    for run, (saved, away, compressed) in enumerate(zip(*kinds, strict=True)):
        inputs = forward.runs[run].positions.inputs
        offloaded = frozenset(inputs[node] for node in away if node in inputs)
        recomputed = frozenset(link.place for link in plan.segments if link.run == run)
        own = InputsPlan(offloaded, recomputed, run in sources)
        nodes.append(SavedNodes(tuple(sorted(saved)), away.difference(inputs), inputs=own, compressed=compressed))
    return tuple(nodes)


def _suggestion(step: StepModel, lowest: int) -> str:
    """Returns the flags that make a step fit whose lowest peak does not."""
    fewer = _fewer_batches(step.context, lowest)
    if not _fits_without_activations(step.context):
        return fewer or "give a larger budget, or an optimizer with fewer states"
    batch = smaller_batch(step)
    if batch is None and fewer:
        return fewer
    if batch is None and step.context.largest is not None and step.context.largest.flattened:
        return "give a larger budget, or a smaller --per_device_train_batch_size"
    if batch is None:
        return "no smaller batch fits: give a larger budget"
    rows, times = batch
    smaller = (
        f"use --per_device_train_batch_size {rows} and {times} times the --gradient_accumulation_steps, for the same "
        "number of rows per optimizer step"
    )
    return f"{smaller}; or {fewer}" if fewer else smaller


def _fits_without_activations(step: StepContext) -> bool:
    return replace(step.fixed, activations=0).peak <= step.limit


def _fewer_batches(step: StepContext, peak: int) -> str:
    """Returns the --gradient_accumulation_steps with which a peak fits; empty if there are none."""
    held = step.micro_batches
    count = held - math.ceil((peak - step.limit) * held / step.fixed.batch) if held > 1 and step.fixed.batch else 0
    if count < 1:
        return ""
    return (
        f"--gradient_accumulation_steps {count} fits: Trainer holds {'both' if held == 2 else f'all {held}'} "
        "micro-batches of an optimizer step on the device"
    )


def smaller_batch(step: StepModel) -> tuple[int, int] | None:
    """Finds the largest half, quarter and so on of a batch for which a plan fits.

    Args:
        step: the step that does not fit.

    Returns:
        Rows of the smaller micro-batch as the data loader counts them, and how many such micro-batches have as many
        rows as the batch; None if no part fits.
    """
    context = step.context
    rows = set(step.forward.rows_with(context.largest))
    if len(rows) != 1:
        return None
    (of_model,) = rows
    whole = context.rows if context.rows and of_model % context.rows == 0 else of_model
    times = 2
    while whole % times == 0:
        # Trainer holds the same number of rows, in more micro-batches.
        batch = context.fixed.batch if context.micro_batches else context.fixed.batch // times
        smaller = replace(context, fixed=replace(context.fixed, batch=batch), aside=context.aside // times)
        micro = replace(step, context=smaller).part(times)
        if micro.solver.fits(micro.context.allowed):
            return whole // times, times
        times *= 2
    return None


def _by_length(step: StepModel, plan: Plan) -> ExtraByLength:
    context = step.context
    lengths = [
        {symbol: size for symbol, size in sizes.items() if is_length(graph.names.get(symbol, ""))}
        for graph, sizes in zip(step.forward.graphs, step.sizes, strict=True)
    ]

    def problem_at(length: int) -> Problem:
        shortened = [
            {**sizes, **{symbol: min(size, length) for symbol, size in tokens.items()}}
            for sizes, tokens in zip(step.sizes, lengths, strict=True)
        ]
        return replace(step, sizes=shortened).problem.problem

    longest = max((size for tokens in lengths for size in tokens.values()), default=0)
    batches = context.largest.lengths if context.largest is not None else ()
    return extra_by_length(batches, longest, plan, problem_at, context.allowed)


def _gain(plan: Plan, costs: str) -> str:
    if not plan.seconds:
        return ""
    offload = f", {gib_text(plan.host_bytes)} of the host for offload" if plan.offloaded else ""
    again = f"{count} layer{'s' if count > 1 else ''}" if (count := len(plan.segments)) else ""
    segments = f", {again} recomputed twice (segments)" if again else ""
    fp8 = f", {len(plan.compressed)} activations in fp8, inexact" if plan.compressed else ""
    return f": {100 * plan.extra_seconds / plan.seconds:+.1f}% time ({costs} costs){offload}{fp8}{segments}"
