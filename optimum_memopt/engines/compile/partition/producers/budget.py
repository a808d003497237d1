"""A budget: the cheapest recompute and offload with which the peak of a step is within it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from optimum_memopt.engines.api.predictions import Frontier
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import offloads, recomputed
from optimum_memopt.engines.compile.graph.problem import SiblingGraphs
from optimum_memopt.engines.compile.graph.symbols import is_length
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import INSTEAD, Producer, Solvable, torchs_own
from optimum_memopt.engines.compile.solver.length_buckets import ExtraByLength, extra_by_length
from optimum_memopt.engines.compile.solver.offload import Host, cheapest, fits
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver, point_of, points_of, solved
from optimum_memopt.errors import DoesNotFitError, MemOptError, UnsupportedModelError
from optimum_memopt.sizes import Budget, gib_text

_WORTH_NAMING = 2**20


@dataclass(frozen=True)
class FromBudget(Producer):
    """The producer of `--memory_opt_budget`."""

    budget: Budget

    @classmethod
    def of(cls, selection: Selection) -> "FromBudget | None":
        return None if selection.budget is None else cls(selection.budget)

    @property
    def bound(self) -> Budget:
        return self.budget

    def refusal(self, why: str) -> MemOptError | None:
        text = f"--memory_opt_budget {self.budget.text}: {why}, so that nothing can be planned"
        return UnsupportedModelError(text, f"without a budget {INSTEAD}")

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = (), solvable: Solvable | None = None) -> Choice:
        """The fastest plan that fits; torch's own partition where that fits too and nothing has to be recomputed.

        Raises:
            DoesNotFitError: nothing fits; it names the lowest peak and what holds it.
        """
        assert solvable is not None
        step, solver, host = solvable.step, solvable.solver, solvable.captured.host(solvable.step)
        without_graphs = replace(step.fixed, activations=0, other_forwards=0).peak
        if without_graphs > step.limit:
            why = "that is without any activations: give a larger budget, or an optimizer with fewer states"
            raise self._does_not_fit(step, without_graphs, {}, why, has_activations=False)
        try:
            plan = cheapest(solver, step.allowed, host)
        except Infeasible as infeasible:
            lowest, suggestion = step.footprint(infeasible.peak).peak, _suggestion(solvable, host)
            raise self._does_not_fit(step, lowest, dict(infeasible.holds), suggestion) from None
        choice = self._choice(graph, solvable, plan)
        return replace(
            choice,
            frontier=_frontier(solvable, plan, host) if solvable.with_curve else None,
            by_length=_by_length(solvable, plan) if solvable.with_lengths else None,
        )

    def _choice(self, graph: AnalyzedGraph, given: Solvable, plan: Plan) -> Choice:
        step = given.step
        sizes = "" if given.captured.sizes == graph.size_hints else f" for batches up to {step.largest}"
        margin = f" less a margin of {gib_text(step.margin)}" if step.margin else ""
        why = f"budget {gib_text(step.limit)}{margin}{sizes}"
        if given.solver.everything.peak <= step.allowed:
            largest = replace(graph, size_hints=given.captured.sizes)
            if (own := _torchs_own(largest, given.solver.problem.siblings, step.allowed)) is not None:
                return replace(own, why=f"{why}: fits without a plan, torch's own partition")
        nodes = graph.joint.nodes
        saved = tuple(nodes[number] for number in plan.saved)
        offloaded = frozenset(nodes[number] for number in plan.offloaded)
        chosen = {*recomputed(graph.candidates, frozenset(saved))}
        chosen |= {candidate for candidate in offloads(graph.candidates) if candidate.activation.root in offloaded}
        return Choice(
            nodes_to_save=saved,
            why=f"{why}{_gain(plan, given.captured.costs.source)}",
            candidates=tuple(candidate for candidate in graph.candidates if candidate in chosen),
        )

    def _does_not_fit(
        self, step: StepContext, peak: int, holds: dict[str, int], suggestion: str, has_activations: bool = True
    ) -> DoesNotFitError:
        fixed = replace(step.fixed, activations=0, gradients=0, step=0)
        parts = {
            "parameters": fixed.parameters + fixed.buffers,
            "optimizer states": fixed.optimizer,
            "accumulated gradients": fixed.accumulated,
            "the batch": fixed.batch,
            "the process": fixed.constant,
            "earlier graphs of the forward": fixed.other_forwards,
            **({} if has_activations else {"gradients and the optimizer's step": peak - fixed.peak}),
            **holds,
        }
        largest = sorted(parts.items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} {gib_text(size)}" for name, size in largest if size >= _WORTH_NAMING)
        held = f"most of it is {named}; " if named else ""
        batch = f" with a batch of {step.largest}, as long as the longest row" if step.largest is not None else ""
        offload = " or offloaded" if step.link else ""
        return DoesNotFitError(
            f"--memory_opt_budget {self.budget.text}: the step takes at least {gib_text(peak)}{batch}, whatever "
            f"is recomputed{offload}; the budget is {gib_text(step.limit)}; {held}{suggestion}",
            peak - step.limit + step.margin,
        )


def _suggestion(given: Solvable, host: Host | None) -> str:
    batch = smaller_batch(given.captured, given.siblings_at, given.step, host)
    if batch is None:
        return "no smaller batch was found to fit: give a larger budget"
    rows, times = batch
    return (
        f"--per_device_train_batch_size {rows} fits, and with {times} times the --gradient_accumulation_steps an "
        "optimizer step has as many rows"
    )


def smaller_batch(
    graph: CapturedGraph, siblings_at: Callable[[int], SiblingGraphs], step: StepContext, host: Host | None
) -> tuple[int, int] | None:
    """The largest half, quarter and so on of a batch for which a plan fits; None where there is none for one row.

    Args:
        graph: that does not fit.
        host: where activations may be offloaded to; None: nowhere.

    Returns:
        Rows of the micro-batch, and how many of them have as many rows as the batch.
    """
    rows = set(graph.row_symbols.values())
    if len(rows) != 1:
        return None
    (whole,) = rows
    times = 2
    while whole % times == 0:
        # Gradients of the earlier micro-batches are there while a later one runs.
        fixed = replace(step.fixed, batch=step.fixed.batch // times, accumulated=step.fixed.gradients)
        allowed = fixed.activations_within(step.limit)
        if fits(Solver(graph.problem(times)).with_siblings(siblings_at(times)), allowed, host):
            return whole // times, times
        times *= 2
    return None


def _frontier(given: Solvable, plan: Plan, host: Host | None) -> Frontier:
    solver, step = given.solver, given.step
    curve = solved(solver.lowest.peak, solver.everything.peak, partial(cheapest, solver, host=host))
    chosen = point_of(plan, step.fixed, step.limit)
    return Frontier(points_of(curve, step.fixed), given.captured.costs.source, chosen)


def _by_length(given: Solvable, plan: Plan) -> ExtraByLength:
    captured, largest = given.captured, given.step.largest
    tokens = {symbol: size for symbol, size in captured.sizes.items() if is_length(captured.names.get(symbol, ""))}

    def shortened(length: int) -> dict[object, int]:
        return {**captured.sizes, **{symbol: min(size, length) for symbol, size in tokens.items()}}

    batches = largest.lengths if largest is not None else ()
    longest = max(tokens.values(), default=0)
    return extra_by_length(
        batches, longest, plan, lambda length: captured.problem_at(shortened(length)), given.step.allowed
    )


def _torchs_own(graph: AnalyzedGraph, siblings: SiblingGraphs, allowed: int) -> Choice | None:
    """torch's own partition, which does not look at the peak; None where it holds more than is allowed."""
    choice, alone = torchs_own(graph)
    left, gradients = alone.forward.end, alone.backward.end - alone.tangents
    in_forward = max(siblings.in_forward(left) + alone.forward.peak.held, siblings.between(left))
    is_within = max(in_forward, siblings.in_backward(left, gradients) + alone.backward.peak.held) <= allowed
    return choice if is_within else None


def _gain(plan: Plan, costs: str) -> str:
    if not plan.seconds:
        return ""
    offload = f", {gib_text(plan.host_bytes)} of the host for offload" if plan.offloaded else ""
    return f": {100 * plan.extra_seconds / plan.seconds:+.1f}% time ({costs} costs){offload}"
