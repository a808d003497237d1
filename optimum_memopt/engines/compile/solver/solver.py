"""The cheapest nodes to save with which a graph's exact peak is within a budget, and the curve of budgets. Pure.

In a run with several plans one has to hold for the longest batch, and every shorter batch pays for it. A plan for
batches up to some length recomputes less; what it takes is found with the plan for the longest: the same graph and
seconds of each operator, with the bytes of a shorter batch. A batch is taken to last as long as it has tokens.
"""

import bisect
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from optimum_memopt.engines.api.predictions import CurvePoint
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.simulation import (
    GraphSimulation,
    held_at_peak,
    operator_of,
    simulate,
    simulate_everything_saved,
)
from optimum_memopt.engines.compile.solver.blocks import PlansOfRun, blocks_of, no_plans
from optimum_memopt.engines.compile.solver.cut import GAP, MEGA, Cut, cut_of, matrix
from optimum_memopt.engines.compile.solver.dynamic_program import DynamicProgram, dynamic_programs
from optimum_memopt.engines.compile.solver.segments import Link

# Operators that all simulations of an improvement may run: a quarter of a second.
_WORK = 100_000
# Programs that are solved at most, and variables above which none is: it would take minutes.
_ROUNDS, _LARGEST = 12, 2500
# Operators of a forward up to which it is quick enough to be asked in any case.
_SMALL = 100
# The shares of a peak that are asked for next where that one was found. With the gap any plan will do: it is found at
# once, or is not there.
_STEPS, _ANY = (0.95, 0.99, 0.999), 1.0
# Collators pad to multiples of it.
_MULTIPLE = 8
# Lengths that are compared, and those of them that are solved for.
_CANDIDATES = 32
_SOLVED = 6
# The share of a step's time that is worth compiling another forward.
WORTH = 0.005


@dataclass(frozen=True)
class Plan:
    """The nodes that a forward saves for its backward, on the device or the host, or compressed.

    Attributes:
        peak: bytes, exact as long as the device waits for no copy too late.
        extra_seconds: of what is recomputed, of conversions, and of waiting for copies.
        seconds: of forward and backward without these.
        offloaded: nodes of `saved` that wait on the host.
        stall: seconds of `extra_seconds` that the device waits for copies.
        host_bytes: of pinned memory.
        segments: arguments of runs that are recomputed by the runs before them.
        compressed: nodes of `saved` that wait in fp8.
    """

    saved: tuple[int, ...]
    peak: int
    extra_seconds: float
    seconds: float
    offloaded: tuple[int, ...] = ()
    stall: float = 0.0
    host_bytes: int = 0
    segments: tuple[Link, ...] = ()
    compressed: tuple[int, ...] = ()


class Infeasible(Exception):
    """No plan fits: the lowest peak found, and what is held at that moment, largest first, in bytes."""

    def __init__(self, peak: int, holds: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(f"no plan fits; the lowest peak is {peak:,} bytes")
        self.peak, self.holds = peak, tuple(holds)


@dataclass(frozen=True)
class Solver:
    """Solves a joint graph, or all of a tape, for any number of budgets; `of_run` as in `Blocks`."""

    problem: Problem
    of_run: PlansOfRun = no_plans

    @cached_property
    def everything(self) -> GraphSimulation:
        return simulate_everything_saved(self.problem)

    @cached_property
    def layers_recomputed(self) -> GraphSimulation:
        """Every layer recomputed from its input, as level 1 has it."""
        problem = self.problem
        outside = {node for node in problem.activations if not problem.layers[node] or problem.is_statistic[node]}
        return simulate(problem, problem.closure((outside | problem.boundaries) - problem.constants))

    @cached_property
    def lowest(self) -> GraphSimulation:
        """The plan with the lowest peak that is found; no budget below it is met."""
        of_blocks = (program.lowest() for pair in self._programs for program in reversed(pair))
        lowest = min(*of_blocks, self.layers_recomputed, key=lambda simulation: simulation.peak)
        # Within a thousandth of where the search ends.
        for step in _STEPS:
            while (lower := self._as_program(int(step * lowest.peak), lowest, [], _ANY)) is not None:
                lowest = lower
        return lowest

    @cached_property
    def seconds(self) -> float:
        """Seconds of the forward and backward with all activations saved."""
        return self.everything.seconds(self.problem)

    def plan(self, simulation: GraphSimulation) -> Plan:
        extra = simulation.extra_seconds(self.problem) - self.everything.extra_seconds(self.problem)
        return Plan(tuple(sorted(simulation.saved)), simulation.peak, extra, self.seconds)

    def solve(self, budget: int, is_final: bool = True) -> Plan:
        """The plan with the least time for recompute of all whose peak fits; of equal ones that with the lowest peak.

        Args:
            budget: bytes that the graph's forward and backward may hold.
            is_final: False: without the last small changes, and in a large graph without the search over all of it
                where something fits already; each takes as long as the rest.

        Raises:
            Infeasible: no plan fits.
        """
        best = self._best(budget, is_final, [])
        if best is None:
            raise Infeasible(self.lowest.peak, _holders(self.problem, self.lowest))
        is_improved = is_final and best is not self.everything
        return self.plan(_improve(self.problem, best, budget) if is_improved else best)

    def plans(self, budgets: Iterable[int]) -> tuple[Plan, ...]:
        """Those found for the budgets that are met, as by `solve` without the last small changes. Together they take
        half as long as one by one, and are as good in the mean (layers of Llama and RoBERTa)."""
        limits: list[_Limit] = []
        found = (self._best(budget, is_final=False, limits=limits) for budget in budgets)
        return tuple(self.plan(best) for best in found if best is not None)

    @cached_property
    def _cut(self) -> Cut | None:
        """The program of the whole graph; None where it has nothing to recompute or too many variables, and for a
        tape of several runs, for which it finds nothing better than their own plans together."""
        if max(self.problem.runs) > 0:
            return None
        forward = enumerate(self.problem.is_forward)
        cut = cut_of(self.problem, [node for node, is_one in forward if is_one and not self.problem.is_number[node]])
        return None if cut is None or len(cut.microseconds) > _LARGEST else cut

    def _best(self, budget: int, is_final: bool, limits: "list[_Limit]") -> GraphSimulation | None:
        if self.everything.peak <= budget:
            return self.everything
        fitting = [candidate for candidate in self._candidates(budget, is_final, limits) if candidate.peak <= budget]
        return min(fitting, key=lambda one: (one.extra_seconds(self.problem), one.peak), default=None)

    def _candidates(self, budget: int, is_final: bool, limits: "list[_Limit]") -> Iterator[GraphSimulation]:
        (with_borders, without_borders), *of_runs = self._programs
        best = without_borders.solve(budget)
        if best is None and budget < self.lowest.peak:
            return
        # What many blocks recompute before the backward of any of them is not in the measure of one block's plan.
        is_measured = best is not None and best.backward.peak <= best.forward.peak
        others = [] if is_measured else [with_borders]
        for program in (*others, *(program for pair in of_runs for program in pair)):
            if (fallback := program.solve(budget)) is not None:
                yield fallback
        yield self.lowest if best is None else best
        yield self.layers_recomputed
        # It takes longer, and wins in small graphs and where the dynamic program finds nothing.
        is_worth_it = sum(self.problem.is_forward) < _SMALL or (best is None and is_final)
        start = best or self.everything
        if is_worth_it and (solved := self._as_program(budget, start, limits)) is not None:
            yield solved

    def _as_program(
        self, budget: int, start: GraphSimulation, limits: "list[_Limit]", gap: float = GAP
    ) -> GraphSimulation | None:
        """The first plan within the budget that the program of the whole graph has, which is the fastest; None where
        none was found.

        No linear limit of bytes can express a peak, so its limits come from simulations of its solutions.

        Args:
            start: whose limits come first.
            limits: those found for other budgets, to which this one's are added.
        """
        cut, plan = self._cut, start
        if cut is None:
            return None
        for _ in range(_ROUNDS):
            limits += [_limit(self.problem, cut, plan, in_backward) for in_backward in (True, False)]
            rows, taken = zip(*limits, strict=True)
            solution = cut.within(matrix(rows, len(cut.microseconds)), (budget - np.array(taken)) / MEGA, gap)
            if solution is None:
                break
            plan = simulate(self.problem, self.problem.closure(cut.saved(solution)))
            if plan.peak <= budget:
                return plan
        return None

    def prepare(self) -> None:
        """Solve what is the same for every budget."""
        _ = self._programs

    @cached_property
    def _programs(self) -> list[tuple[DynamicProgram, DynamicProgram]]:
        """Those of layers and what is between them, and where these are parts of a tape's runs, of the runs."""
        kinds = [blocks_of(self.problem, self.of_run)]
        if max(self.problem.runs) > 0:
            runs = blocks_of(self.problem, self.of_run, are_runs=True)
            kinds += [runs] if len(runs.all) < len(kinds[0].all) else []
        return list(map(dynamic_programs, kinds))


def _holders(problem: Problem, simulation: GraphSimulation) -> tuple[tuple[str, int], ...]:
    """The largest groups of what is held at the peak: gradients, else by where it is computed."""
    gradients = {problem.roots[node] for node in problem.backward_outputs}
    in_backward = simulation.backward.peak > simulation.forward.peak
    held = held_at_peak(problem, simulation, in_backward)
    run = simulation.backward if in_backward else simulation.forward
    if run.held:
        at_peak = run.order[run.held.index(run.peak)]
        held[at_peak] = held.get(at_peak, 0) + problem.workspaces[at_peak]
    groups: dict[str, int] = {}
    for node, size in held.items():
        layer = problem.layers[node]
        computed = f"layer {layer}" if layer else f"{operator_of(problem, node)} outside of layers"
        where = "gradients of parameters" if node in gradients else computed
        groups[where] = groups.get(where, 0) + size
    return tuple(sorted(groups.items(), key=lambda item: -item[1])[:4])


def _improve(problem: Problem, best: GraphSimulation, budget: int) -> GraphSimulation:
    """The plan after all changes that make it faster within the budget, as far as the work allows."""
    remaining = _WORK // len(problem.names)
    seconds = best.extra_seconds(problem)
    seen = {best.saved}
    while True:
        for roots in _changes(problem, best):
            saved = problem.closure(roots)
            if saved in seen:
                continue
            seen.add(saved)
            if not remaining:
                return best
            remaining -= 1
            changed = simulate(problem, saved)
            if changed.peak <= budget and changed.extra_seconds(problem) < seconds - 1e-12:
                best, seconds = changed, changed.extra_seconds(problem)
                break
        else:
            return best


def _changes(problem: Problem, plan: GraphSimulation) -> Iterator[frozenset[int]]:
    """One more saved, the dearest to recompute first; one in exchange for another; one less."""
    own = (node for node in sorted(set(plan.recomputed)) if problem.roots[node] == node and problem.is_tensor[node])
    missing = sorted((root for root in own if problem.bytes[root]), key=lambda root: -problem.seconds[root])
    saved = [node for node in sorted(plan.saved) if not problem.is_kept[node]]
    yield from (plan.saved | {root} for root in missing)
    yield from (plan.saved - {node} | {root} for root in missing for node in saved)
    yield from (plan.saved - {node} for node in saved)


# Megabytes of the program's variables, by their columns, and bytes that are held beside them.
_Limit = tuple[dict[int, float], int]


def _limit(problem: Problem, cut: Cut, plan: GraphSimulation, in_backward: bool) -> _Limit:
    """Megabytes of the program's variables held at the highest point of a run, and bytes that are held there beside
    them, for the workspace too.

    What could be saved, and is not, counts among the variables: if it is saved, it is held there.
    """
    run = plan.backward if in_backward else plan.forward
    held = held_at_peak(problem, plan, in_backward)
    top = run.held.index(run.peak)
    row: dict[int, float] = {}
    taken = run.peak - sum(held.values())
    for node, size in held.items():
        if node in plan.saved:
            column = cut.roots.get(node)
        else:
            source = problem.picks[node]
            column = cut.operators.get(node if source is None else source) if in_backward else None
        if column is None:
            taken += size
        else:
            row[column] = row.get(column, 0.0) + size / MEGA
    if in_backward:
        # A saved root is held until the last of the backward's own operators that reads it.
        here = next((node for node in run.order[top:] if problem.is_backward[node]), len(problem.names))
        last = {problem.roots[read]: node for node in problem.backward_operators for read in problem.reads[node]}
    for node, column in cut.roots.items():
        is_held_if_saved = last.get(node, -1) >= here if in_backward else node <= run.order[top]
        if node not in held and is_held_if_saved:
            row[column] = problem.bytes[node] / MEGA
    return row, taken


def solved(low: int, high: int, cheapest: Callable[[int], Plan], count: int = 10) -> list[tuple[int, Plan]]:
    """Budgets at equal distances in bytes from `low` to `high`, and the fastest plan found that is within each."""
    budgets = [low + (high - low) * number // (count - 1) for number in range(count)]
    # The solver is no exact one: what it finds for a larger budget may fit a smaller one, and be faster.
    plans = sorted(map(cheapest, budgets), key=lambda plan: (plan.extra_seconds, plan.peak))
    return [(budget, next(plan for plan in plans if plan.peak <= budget)) for budget in budgets]


def points_of(plans: Iterable[tuple[int, Plan]], outside: Footprint) -> tuple[CurvePoint, ...]:
    """The curve of plans by budget."""
    return tuple(point_of(plan, outside, replace(outside, activations=budget).peak) for budget, plan in plans)


def point_of(plan: Plan, outside: Footprint, budget: int | None = None) -> CurvePoint:
    """A plan on the curve for a step that may take `budget` bytes; None: what it takes."""
    peak = replace(outside, activations=plan.peak).peak
    return CurvePoint(peak if budget is None else budget, peak, plan.extra_seconds, plan.seconds)


@dataclass(frozen=True)
class ExtraByLength:
    """The extra time of plans for shorter batches.

    Attributes:
        batches: the longest row of each batch of an epoch; where they are not known, all lengths are as frequent.
        shares: extra time of the plan for each length, as a share of the time without; the last is the largest batch.
    """

    batches: Sequence[int] = ()
    is_known: bool = False
    shares: Mapping[int, float] = field(default_factory=dict)


def extra_by_length(
    batches: Sequence[int], longest: int, plan: Plan, problem_at: Callable[[int], Problem], allowed: int
) -> ExtraByLength:
    """The extra time of plans for shorter batches; `batches` as above, empty where they are not known."""
    rows = batches or range(min(_MULTIPLE, longest), longest + 1, _MULTIPLE)
    lengths = candidate_lengths(rows, longest)
    if plan.extra_seconds <= 0:
        return ExtraByLength(rows, bool(batches), dict.fromkeys(lengths, 0.0))
    shorter = _extra_seconds(problem_at, lengths[:-1], allowed, plan.extra_seconds)
    shares = (seconds / plan.seconds for seconds in (*shorter, plan.extra_seconds))
    return ExtraByLength(rows, bool(batches), dict(zip(lengths, shares, strict=True)))


def candidate_lengths(batches: Sequence[int], longest: int) -> tuple[int, ...]:
    """Lengths that a plan may be made for, ascending, `longest` among them."""
    rounded = sorted({-(-length // _MULTIPLE) * _MULTIPLE for length in batches})
    shorter = [length for length in rounded if length < longest]
    every = math.ceil(len(shorter) / _CANDIDATES) or 1
    return (*reversed(shorter[::-1][::every]), longest)


def _extra_seconds(
    problem_at: Callable[[int], Problem], lengths: Sequence[int], allowed: int, most: float
) -> tuple[float, ...]:
    """Seconds of recompute in the plan for each of some ascending lengths; `most` are those for a longer batch."""
    free = bisect.bisect_left(lengths, True, key=lambda length: Solver(problem_at(length)).everything.peak > allowed)
    rest = lengths[free:]
    every = math.ceil(len(rest) / _SOLVED) or 1
    extra: list[float] = []
    # A length that is not solved for has the plan of the next longer one.
    for index, length in enumerate(reversed(rest)):
        if index % every == 0:
            with contextlib.suppress(Infeasible):
                most = min(most, Solver(problem_at(length)).solve(allowed).extra_seconds)
        extra.append(most)
    return (*(0.0,) * free, *reversed(extra))


def expected_extra(batches: Mapping[int, int], shares: Mapping[int, float], chosen: Sequence[int]) -> float:
    """Extra time of an epoch as a share of its time; each of the batches, counted by length, runs under the plan for
    the shortest chosen length that is enough, or for the longest."""
    lengths = sorted(chosen)
    total, extra = 0, 0.0
    for length, count in batches.items():
        plan = lengths[min(bisect.bisect_left(lengths, length), len(lengths) - 1)]
        total += length * count
        extra += length * count * shares[plan]
    return extra / total if total else 0.0


def best_lengths(batches: Sequence[int], shares: Mapping[int, float], most: int) -> tuple[int, ...]:
    """The lengths below the largest for which cheaper plans save most of an epoch's time, ascending.

    Fewer than asked for where one more would not be worth compiling it.
    """
    counts = Counter(batches)
    *shorter, longest = sorted(shares)
    best: tuple[int, ...] = ()
    before = expected_extra(counts, shares, (longest,))
    for count in range(1, most + 1):
        chosen = itertools.combinations(shorter, count)
        options = ((expected_extra(counts, shares, (*lengths, longest)), lengths) for lengths in chosen)
        extra, lengths = min(options, default=(before, ()))
        if before - extra < WORTH:
            break
        best, before = lengths, extra
    return best
