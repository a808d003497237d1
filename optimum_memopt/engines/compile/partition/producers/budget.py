"""A budget: the cheapest recompute and offload with which the peak of a step is within so many bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from optimum_memopt.engines.api.predictions import Frontier
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import Candidate, offloads, recomputed
from optimum_memopt.engines.compile.graph.problem import Problem, SiblingGraphs, problem_of, problems_of
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, is_length, larger_sizes
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.torch_default import torchs_own
from optimum_memopt.engines.compile.solver.length_buckets import ExtraByLength, extra_by_length
from optimum_memopt.engines.compile.solver.offload import cheapest, host_of
from optimum_memopt.engines.compile.solver.plan import Infeasible, Plan, point_of, points_of, solved
from optimum_memopt.engines.compile.solver.siblings import GraphReservations, KnownGraph, SmallerBatch, smaller_batch
from optimum_memopt.engines.compile.solver.solver import Solver
from optimum_memopt.engines.compile.train.step_context import Step
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.plans.matching import Matched
from optimum_memopt.sizes import Budget, gib_text

_WORTH_NAMING = 2**20


@dataclass(frozen=True)
class FromBudget:
    """See `Producer`.

    Attributes:
        budget: as the user wrote it.
        step: asked for each graph; None: the budget, a size, is for the graph alone.
        costs: asked for each graph; None: every operator costs the bytes that it allocates.
        times: filled with what plans for shorter batches would take; None: nobody asks.
        frontiers: filled with what other budgets would cost; None: nobody asks.
        graphs: of the forward, those of earlier tries too.
    """

    budget: Budget
    step: Callable[[Budget], Step] | None = None
    costs: Callable[[AnalyzedGraph], Costs] | None = None
    times: list[ExtraByLength] | None = None
    frontiers: list[Frontier] | None = None
    graphs: GraphReservations = field(default_factory=GraphReservations)

    @classmethod
    def of(cls, selection: Selection) -> "FromBudget | None":
        return None if selection.budget is None else cls(selection.budget)

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """Nothing is asked for by name."""
        return Matched()

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """See `Producer.choose`.

        Raises:
            DoesNotFitError: nothing fits; it names the floor and what holds it.
        """
        step = self.step(self.budget) if self.step is not None else Step(self.budget.on_device(0, 0), Footprint(0, 0))
        names = graph.names
        first, graph = graph, replace(graph, size_hints=larger_sizes(graph.size_hints, names, step.largest))
        costs = self.costs(graph) if self.costs is not None else _by_bytes(graph)
        problem_at = problems_of(graph, costs.seconds, costs.workspaces)
        known = KnownGraph(graph.signature, problem_at, graph.size_hints, names)
        siblings_at = partial(self.graphs.siblings, len(earlier), graph.signature)
        self.graphs.note(len(earlier), known)
        solver = Solver(known.problem()).with_siblings(siblings_at())
        # Before the last look at what the process holds.
        host = host_of(graph, step.link, step.host)
        is_asked = self.frontiers is not None and not earlier
        cheapest_at = partial(cheapest, solver, host=host)
        curve = solved(solver.lowest.peak, solver.everything.peak, cheapest_at) if is_asked else ()
        if self.step is not None:
            if solver.everything.peak > step.outside.activations_within(step.bytes):
                solver.prepare()
            # Again after measuring and solving, which leave something behind in the process.
            step = self.step(self.budget)
        step = replace(step, outside=_with_batch_of(graph, first, step.outside))
        allowed = step.outside.activations_within(step.bytes - step.margin)
        optimizer_step = replace(step.outside, activations=0, other_forwards=0).peak
        if optimizer_step > step.bytes:
            raise self._does_not_fit(step, Infeasible(0), optimizer_step, None)
        try:
            found = cheapest(solver, allowed, host)
        except Infeasible as error:
            fits = smaller_batch(known, siblings_at, step.outside, step.bytes, host)
            peak = replace(step.outside, activations=error.peak).peak
            raise self._does_not_fit(step, error, peak, fits) from None
        if self.times is not None and not earlier:
            tokens = {symbol: size for symbol, size in graph.size_hints.items() if is_length(names.get(symbol, ""))}
            batches = step.largest.lengths if step.largest is not None else ()
            shortened = partial(_shortened, problem_at, graph.size_hints, tokens)
            longest = max(tokens.values(), default=0)
            self.times[:] = [extra_by_length(batches, longest, found, shortened, allowed)]
        if self.frontiers is not None and curve:
            chosen = point_of(found, step.outside, step.bytes)
            self.frontiers.append(Frontier(points_of(curve, step.outside), costs.source, chosen))
        sizes = "" if graph.size_hints == first.size_hints else f" for batches up to {step.largest}"
        margin = f" less a margin of {gib_text(step.margin)}" if step.margin else ""
        why = f"budget {gib_text(step.bytes)}{margin}{sizes}"
        if solver.everything.peak <= allowed and (own := _torchs_own(graph, siblings_at(), allowed)) is not None:
            return replace(own, why=f"{why}: fits without a plan, torch's own partition")
        return _choice(graph, found, f"{why}{_gain(found, costs)}")

    def _does_not_fit(self, step: Step, error: Infeasible, peak: int, fits: SmallerBatch | None) -> DoesNotFitError:
        outside = replace(step.outside, activations=0, gradients=0, step=0)
        parts = {
            "parameters": outside.parameters + outside.buffers,
            "optimizer states": outside.optimizer,
            "accumulated gradients": outside.accumulated,
            "the batch": outside.batch,
            "the process": outside.constant,
            "earlier graphs of the forward": outside.other_forwards,
            **({} if error.peak else {"gradients and the optimizer's step": peak - outside.peak}),
            **dict(error.holds),
        }
        largest = sorted(parts.items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} {gib_text(size)}" for name, size in largest if size >= _WORTH_NAMING)
        held = f"most of it is {named}; " if named else ""
        batch = f" with a batch of {step.largest}, as long as the longest row" if step.largest is not None else ""
        offload = " or offloaded" if step.link else ""
        return DoesNotFitError(
            f"--memory_opt_budget {self.budget.text}: the step takes at least {gib_text(peak)}{batch}, whatever "
            f"is recomputed{offload}; the budget is {gib_text(step.bytes)}; {held}"
            f"{_way_out(error, fits)}",
            peak - step.bytes + step.margin,
        )


def _shortened(
    problem_at: Callable[[SymbolValues], Problem], sizes: SymbolValues, tokens: SymbolValues, length: int
) -> Problem:
    """A graph with batches of at most `length` tokens; `tokens` are those of its `sizes` that are lengths."""
    return problem_at({**sizes, **{symbol: min(size, length) for symbol, size in tokens.items()}})


def _with_batch_of(graph: AnalyzedGraph, first: AnalyzedGraph, outside: Footprint) -> Footprint:
    """`outside` with a batch that has grown from the sizes of `first` to those of `graph`."""
    growth = math.prod(graph.size_hints[symbol] / size for symbol, size in first.size_hints.items())
    return replace(outside, batch=math.ceil(outside.batch * growth))


def _way_out(error: Infeasible, fits: SmallerBatch | None) -> str:
    if not error.peak:
        return "that is without any activations: give a larger budget, or an optimizer with fewer states"
    if fits is None:
        return "no smaller batch was found to fit: give a larger budget"
    return (
        f"--per_device_train_batch_size {fits.rows} fits, and with {fits.times} times the "
        "--gradient_accumulation_steps an optimizer step has as many rows"
    )


def _choice(graph: AnalyzedGraph, found: Plan, why: str) -> Choice:
    nodes = graph.joint.nodes
    saved = tuple(nodes[number] for number in found.saved)
    offloaded = frozenset(nodes[number] for number in found.offloaded)
    chosen = {*recomputed(graph.candidates, frozenset(saved))}
    chosen |= {candidate for candidate in offloads(graph.candidates) if candidate.activation.root in offloaded}
    return Choice(
        nodes_to_save=saved,
        why=why,
        candidates=tuple(candidate for candidate in graph.candidates if candidate in chosen),
    )


def _torchs_own(graph: AnalyzedGraph, siblings: SiblingGraphs, allowed: int) -> Choice | None:
    """torch's own partition; None where it holds more than is allowed, as it may: it does not look at the peak."""
    choice, alone = torchs_own(graph)
    left, gradients = alone.forward.end, alone.backward.end - alone.tangents
    in_forward = max(siblings.in_forward(left) + alone.forward.peak.held, siblings.between(left))
    fits = max(in_forward, siblings.in_backward(left, gradients) + alone.backward.peak.held) <= allowed
    return choice if fits else None


def _gain(found: Plan, costs: Costs) -> str:
    if not found.seconds:
        return ""
    offload = f", {gib_text(found.host_bytes)} of the host for offload" if found.offloaded else ""
    return f": {100 * found.extra_seconds / found.seconds:+.1f}% time ({costs.source} costs){offload}"


def _by_bytes(graph: AnalyzedGraph) -> Costs:
    """Each operator as long as what it allocates is large: without a device, the order of most of them."""
    problem = problem_of(graph, [0.0] * len(graph.joint.nodes))
    seconds = (sum(problem.bytes[node] for node in nodes) / 1e12 for nodes in problem.allocates)
    return Costs((*seconds, 0.0), "no")
