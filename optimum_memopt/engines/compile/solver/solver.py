"""Finds the cheapest nodes to save with which a graph's exact peak is within a budget, and the curve of budgets. Pure.

A single plan must fit the longest batch, and every shorter batch pays for it. A plan for batches up to some length
recomputes less; its cost is found along with the plan for the longest batch, from the same graph and operator times
with the bytes of the shorter batch. The time of a batch is assumed to be proportional to its tokens.
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

# Total number of operators that the simulations of one improvement may run: a quarter of a second.
_WORK = 100_000
# Maximum number of integer programs per search, and of their variables: larger ones would take minutes.
_ROUNDS, _LARGEST = 12, 2500
# Number of forward operators below which the integer program is quick enough to be solved in any case.
_SMALL = 100
# Shares of the lowest peak found so far that the search tries next. At this gap any plan is good enough, so a program
# is solved at once or not at all.
_STEPS, _ANY = (0.95, 0.99, 0.999), 1.0
# Collators pad lengths to multiples of this.
_MULTIPLE = 8
# Maximum number of lengths that are compared, and of lengths that are solved for.
_CANDIDATES = 32
_SOLVED = 6
# Share of a step's time for which compiling another forward is worthwhile.
WORTH = 0.005


@dataclass(frozen=True)
class Plan:
    """The nodes that a forward saves for its backward, on the device or the host, or compressed.

    Attributes:
        peak: peak in bytes; exact unless the device waits for a copy too late.
        extra_seconds: seconds of recompute, of conversions, and of waiting for copies.
        seconds: seconds of forward and backward without `extra_seconds`.
        offloaded: nodes of `saved` that wait on the host.
        stall: the part of `extra_seconds` in which the device waits for copies.
        host_bytes: bytes of pinned memory.
        segments: arguments of runs that are recomputed by re-running the runs that returned them.
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
    """Raised if no plan fits, with the lowest peak found and what is held at that moment, largest first, in bytes."""

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
        """Returns the plan that recomputes every layer from its input, as level 1 does."""
        problem = self.problem
        outside = {node for node in problem.activations if not problem.layers[node] or problem.is_statistic[node]}
        return simulate(problem, problem.closure((outside | problem.boundaries) - problem.constants))

    @cached_property
    def lowest(self) -> GraphSimulation:
        """Returns the plan with the lowest peak found; lower budgets are not met."""
        of_blocks = (program.lowest() for pair in self._programs for program in reversed(pair))
        lowest = min(*of_blocks, self.layers_recomputed, key=lambda simulation: simulation.peak)
        # Ends within a thousandth of the lowest peak that the integer program can reach.
        for step in _STEPS:
            while (lower := self._as_program(int(step * lowest.peak), lowest, [], _ANY)) is not None:
                lowest = lower
        return lowest

    @cached_property
    def seconds(self) -> float:
        """Returns the seconds of the forward and backward with all activations saved."""
        return self.everything.seconds(self.problem)

    def plan(self, simulation: GraphSimulation) -> Plan:
        extra = simulation.extra_seconds(self.problem) - self.everything.extra_seconds(self.problem)
        return Plan(tuple(sorted(simulation.saved)), simulation.peak, extra, self.seconds)

    def solve(self, budget: int, is_final: bool = True) -> Plan:
        """Returns the plan with the least recompute time whose peak fits; among equal ones that with the lowest peak.

        Args:
            budget: bytes that the graph's forward and backward may hold.
            is_final: False skips the last small changes, and in a large graph also the integer program, which runs
                there if the dynamic program finds nothing; each takes as long as the rest.

        Raises:
            Infeasible: no plan fits.
        """
        best = self._best(budget, is_final, [])
        if best is None:
            raise Infeasible(self.lowest.peak, _holders(self.problem, self.lowest))
        is_improved = is_final and best is not self.everything
        return self.plan(_improve(self.problem, best, budget) if is_improved else best)

    def plans(self, budgets: Iterable[int]) -> tuple[Plan, ...]:
        """Returns plans for the budgets that can be met, as from `solve` with `is_final=False`. Solving them together
        takes half as long as one by one, and they are as good on average (layers of Llama and RoBERTa)."""
        limits: list[_Limit] = []
        found = (self._best(budget, is_final=False, limits=limits) for budget in budgets)
        return tuple(self.plan(best) for best in found if best is not None)

    @cached_property
    def _cut(self) -> Cut | None:
        """Returns the integer program of the whole graph; None if it has nothing to recompute or too many variables,
        and for a tape of several runs: there it finds nothing better than the runs' own plans combined."""
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
        # The measurement of one block's plan misses what many blocks recompute before the backward of any of them.
        is_measured = best is not None and best.backward.peak <= best.forward.peak
        others = [] if is_measured else [with_borders]
        for program in (*others, *(program for pair in of_runs for program in pair)):
            if (fallback := program.solve(budget)) is not None:
                yield fallback
        yield self.lowest if best is None else best
        yield self.layers_recomputed
        # The integer program takes longer, and wins in small graphs and where the dynamic program finds nothing.
        is_worth_it = sum(self.problem.is_forward) < _SMALL or (best is None and is_final)
        start = best or self.everything
        if is_worth_it and (solved := self._as_program(budget, start, limits)) is not None:
            yield solved

    def _as_program(
        self, budget: int, start: GraphSimulation, limits: "list[_Limit]", gap: float = GAP
    ) -> GraphSimulation | None:
        """Returns the first solution of the whole graph's integer program within the budget, which is the fastest;
        None if none was found.

        A peak is not a linear constraint on bytes, so the program's limits come from simulations of its solutions.

        Args:
            start: the plan whose limits come first.
            limits: limits found for other budgets; this budget's are appended.
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
        """Compute what is the same for every budget."""
        _ = self._programs

    @cached_property
    def _programs(self) -> list[tuple[DynamicProgram, DynamicProgram]]:
        """Returns the dynamic programs over layers and the operators between them; for a tape with fewer runs than
        such blocks, also those over its runs."""
        kinds = [blocks_of(self.problem, self.of_run)]
        if max(self.problem.runs) > 0:
            runs = blocks_of(self.problem, self.of_run, are_runs=True)
            kinds += [runs] if len(runs.all) < len(kinds[0].all) else []
        return list(map(dynamic_programs, kinds))


def _holders(problem: Problem, simulation: GraphSimulation) -> tuple[tuple[str, int], ...]:
    """Returns the largest groups of storages held at the peak: gradients, and others by where they are computed."""
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
        computed = f"layer {layer}" if layer else f"operator {operator_of(problem, node)} outside of layers"
        where = "gradients of parameters" if node in gradients else computed
        groups[where] = groups.get(where, 0) + size
    return tuple(sorted(groups.items(), key=lambda item: -item[1])[:4])


def _improve(problem: Problem, best: GraphSimulation, budget: int) -> GraphSimulation:
    """Returns the plan after all changes that make it faster within the budget, up to `_WORK`."""
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
    """Yields changed sets of saved nodes: one more, the dearest to recompute first; one exchanged for another; one
    less."""
    own = (node for node in sorted(set(plan.recomputed)) if problem.roots[node] == node and problem.is_tensor[node])
    missing = sorted((root for root in own if problem.bytes[root]), key=lambda root: -problem.seconds[root])
    saved = [node for node in sorted(plan.saved) if not problem.is_kept[node]]
    yield from (plan.saved | {root} for root in missing)
    yield from (plan.saved - {node} | {root} for root in missing for node in saved)
    yield from (plan.saved - {node} for node in saved)


# Megabytes of the program's variables by column, and bytes of everything else that is held.
_Limit = tuple[dict[int, float], int]


def _limit(problem: Problem, cut: Cut, plan: GraphSimulation, in_backward: bool) -> _Limit:
    """Returns the megabytes of the program's variables held at the highest point of a run, and the bytes of everything
    else held there, including workspace.

    A root that could be saved, but is not, counts among the variables if it would be held there.
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
    """Returns budgets at equal distances in bytes from `low` to `high`, each with the fastest plan found within it."""
    budgets = [low + (high - low) * number // (count - 1) for number in range(count)]
    # The solver is not exact: its plan for a larger budget may fit a smaller one, and be faster.
    plans = sorted(map(cheapest, budgets), key=lambda plan: (plan.extra_seconds, plan.peak))
    return [(budget, next(plan for plan in plans if plan.peak <= budget)) for budget in budgets]


def points_of(plans: Iterable[tuple[int, Plan]], outside: Footprint) -> tuple[CurvePoint, ...]:
    """Returns the curve of plans by budget."""
    return tuple(point_of(plan, outside, replace(outside, activations=budget).peak) for budget, plan in plans)


def point_of(plan: Plan, outside: Footprint, budget: int | None = None) -> CurvePoint:
    """Returns a plan's point on the curve for a step that may take `budget` bytes; None: the step's own peak."""
    peak = replace(outside, activations=plan.peak).peak
    return CurvePoint(peak if budget is None else budget, peak, plan.extra_seconds, plan.seconds)


@dataclass(frozen=True)
class ExtraByLength:
    """The extra time of plans for shorter batches.

    Attributes:
        batches: the longest row of each batch of an epoch; if they are not known, each length once.
        is_known: `batches` are those of the epoch.
        shares: extra time of the plan for each length, as a share of the time without it; the last is the largest
            batch's.
    """

    batches: Sequence[int] = ()
    is_known: bool = False
    shares: Mapping[int, float] = field(default_factory=dict)


def extra_by_length(
    batches: Sequence[int], longest: int, plan: Plan, problem_at: Callable[[int], Problem], allowed: int
) -> ExtraByLength:
    """Returns the extra time of plans for shorter batches; `batches` as in `ExtraByLength`, empty if they are not
    known."""
    rows = batches or range(min(_MULTIPLE, longest), longest + 1, _MULTIPLE)
    lengths = candidate_lengths(rows, longest)
    if plan.extra_seconds <= 0:
        return ExtraByLength(rows, bool(batches), dict.fromkeys(lengths, 0.0))
    shorter = _extra_seconds(problem_at, lengths[:-1], allowed, plan.extra_seconds)
    shares = (seconds / plan.seconds for seconds in (*shorter, plan.extra_seconds))
    return ExtraByLength(rows, bool(batches), dict(zip(lengths, shares, strict=True)))


def candidate_lengths(batches: Sequence[int], longest: int) -> tuple[int, ...]:
    """Returns the lengths that a plan may be made for, ascending, including `longest`."""
    rounded = sorted({-(-length // _MULTIPLE) * _MULTIPLE for length in batches})
    shorter = [length for length in rounded if length < longest]
    every = math.ceil(len(shorter) / _CANDIDATES) or 1
    return (*reversed(shorter[::-1][::every]), longest)


def _extra_seconds(
    problem_at: Callable[[int], Problem], lengths: Sequence[int], allowed: int, most: float
) -> tuple[float, ...]:
    """Returns the seconds of recompute in the plan for each length, ascending; `most` is that for a longer batch."""
    free = bisect.bisect_left(lengths, True, key=lambda length: Solver(problem_at(length)).everything.peak > allowed)
    rest = lengths[free:]
    every = math.ceil(len(rest) / _SOLVED) or 1
    extra: list[float] = []
    # A length that is not solved for takes the plan of the next longer one.
    for index, length in enumerate(reversed(rest)):
        if index % every == 0:
            with contextlib.suppress(Infeasible):
                most = min(most, Solver(problem_at(length)).solve(allowed).extra_seconds)
        extra.append(most)
    return (*(0.0,) * free, *reversed(extra))


def expected_extra(batches: Mapping[int, int], shares: Mapping[int, float], chosen: Sequence[int]) -> float:
    """Returns the extra time of an epoch as a share of its time. Each batch runs under the plan for the shortest
    chosen length that covers it, or else for the longest; `batches` counts them by length."""
    lengths = sorted(chosen)
    total, extra = 0, 0.0
    for length, count in batches.items():
        plan = lengths[min(bisect.bisect_left(lengths, length), len(lengths) - 1)]
        total += length * count
        extra += length * count * shares[plan]
    return extra / total if total else 0.0


def best_lengths(batches: Sequence[int], shares: Mapping[int, float], most: int) -> tuple[int, ...]:
    """Returns up to `most` lengths below the largest whose plans save the most of an epoch's time, ascending.

    Returns fewer if one more is not worth compiling.
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
