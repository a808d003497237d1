"""Compression within a budget: which saved activations wait in fp8, where that is cheaper than recompute. Pure."""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optimum_memopt.engines.compile.graph.analyzed_graph import saved_sources
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, seconds_of, simulate
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver

# Bytes beyond the budget that are compressed, as shares of what compression can take away.
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
# What compression has to save of a step's time: it is inexact.
_WORTH = 0.01
# Activations of a plan, the dearest first, of which each is tried without its compression.
_TRIED = 16


@dataclass(frozen=True)
class Compression:
    """The compression that plans may mix with recompute.

    Attributes:
        forward: the graphs as one problem, with the conversions of all activations that may be compressed.
        deciding: operators of each run from whose operands integers follow.
    """

    forward: TapeProblem
    deciding: Sequence[frozenset[int]]

    @cached_property
    def numbers(self) -> tuple[dict[int, int], ...]:
        """By run, the nodes of its own problem and their numbers in the problem of all."""
        return tuple(map(self.forward.numbers, range(len(self.forward.runs))))

    @cached_property
    def most(self) -> int:
        """Bytes that compressing all saved activations takes away."""
        problem = self.forward.problem
        return sum(_saving(problem, node) for node in problem.conversions)

    def simulated(self, plain: TapeProblem, plan: Plan) -> GraphSimulation:
        """The graphs under a plan for the problem without conversions, on the device what is offloaded."""
        saved = self.forward.of_all(plain.of_runs(frozenset(plan.saved)))
        compressed = (
            self.numbers[run][node] for run, nodes in enumerate(plain.of_places(plan.compressed)) for node in nodes
        )
        return simulate(self.forward.problem, saved, frozenset(compressed))

    def groups(self, saved: Sequence[frozenset[int]]) -> list[tuple[int, ...]]:
        """Activations that are compressed together, the same of all runs of a graph, so that it keeps as many
        partitions; those that save most for their seconds first.

        Args:
            saved: by each run, of its own problem.
        """
        problem, graphs, runs = self.forward.problem, self.forward.graphs, self.forward.runs
        exact = [decided_from(*each) for each in zip(runs, self.deciding, saved, strict=True)]
        kept = {(graphs[run], node) for run, nodes in enumerate(exact) for node in nodes}
        groups: dict[tuple[int, int], list[int]] = {}
        for run, nodes in enumerate(saved):
            for node in sorted(nodes & runs[run].conversions.keys()):
                if (key := (graphs[run], node)) not in kept:
                    groups.setdefault(key, []).append(self.numbers[run][node])

        def price(group: Sequence[int]) -> tuple[float, int]:
            saving = sum(_saving(problem, node) for node in group)
            return _seconds(problem, group) / max(1, saving), -saving

        return sorted(map(tuple, groups.values()), key=price)


def _saving(problem: Problem, node: int) -> int:
    return problem.bytes[node] - sum(problem.bytes[each] for each in problem.conversions[node].saved)


def _seconds(problem: Problem, nodes: Sequence[int]) -> float:
    conversions = (problem.conversions[node] for node in nodes)
    return seconds_of(problem, (each for one in conversions for each in (*one.forward, *one.backward)))


def decided_from(problem: Problem, deciding: frozenset[int], saved: frozenset[int]) -> frozenset[int]:
    """See `analyzed_graph.decided_from`.

    Args:
        deciding: operators that make integers of numbers, or as many results as their values say.
    """
    recomputed = problem.needed(problem.backward_reads, saved)
    operands = (read for node in recomputed & deciding for read in problem.reads[node])
    found = saved_sources(operands, saved, recomputed, problem.reads.__getitem__)
    return frozenset(problem.roots[node] for node in found)


def with_compression(
    solver: Solver,
    plain: TapeProblem,
    compression: Compression,
    exact: Plan | None,
    budget: int,
    few: Callable[[Plan, int], Plan],
) -> Plan | None:
    """The fastest plan with compression; None where it gains less than `_WORTH` over the exact one (None: none fits),
    or fits no better.

    Args:
        plain: the problem of the solver.
        few: a plan with few partitions of each graph, within so many bytes.
    """
    worth = _WORTH * solver.seconds
    alone = float("inf") if exact is None else exact.extra_seconds
    if alone <= worth:
        return None
    plans = (
        _compressed(solver, plain, compression, few(plan, allowed), budget)
        for plan, allowed in _plans_to_compress(solver, compression, budget)
    )
    best = min(filter(None, plans), key=lambda plan: (plan.extra_seconds, plan.peak), default=None)
    return best if best is not None and best.extra_seconds <= alone - worth else None


def _plans_to_compress(solver: Solver, compression: Compression, budget: int) -> Iterator[tuple[Plan, int]]:
    """Plans for larger budgets, with these."""
    larger = budget
    if budget < solver.lowest.peak:
        for simulation in dict.fromkeys((solver.lowest, solver.layers_recomputed)):
            yield solver.plan(simulation), simulation.peak
        larger = solver.lowest.peak
    most = min(compression.most, solver.everything.peak - larger)
    for share in _SHARES:
        relaxed = larger + int(share * most)
        with contextlib.suppress(Infeasible):
            yield solver.solve(relaxed, is_final=False), relaxed


def _compressed(solver: Solver, plain: TapeProblem, compression: Compression, plan: Plan, budget: int) -> Plan | None:
    """A plan for a larger budget with the least compression with which it is within this one; None where none is."""
    runs = plain.of_runs(frozenset(plan.saved))
    saved, groups = compression.forward.of_all(runs), compression.groups(runs)
    problem = compression.forward.problem

    def simulated(chosen: Sequence[tuple[int, ...]]) -> GraphSimulation:
        return simulate(problem, saved, frozenset(node for group in chosen for node in group))

    if simulated(groups).peak > budget:
        return None
    count = bisect.bisect_left(range(len(groups)), True, key=lambda count: simulated(groups[:count]).peak <= budget)
    chosen = groups[:count]
    for group in sorted(chosen, key=lambda group: -_seconds(problem, group))[:_TRIED]:
        fewer = [each for each in chosen if each != group]
        if simulated(fewer).peak <= budget:
            chosen = fewer
    simulation = simulated(chosen)
    if not chosen or simulation.peak > budget:
        return None
    extra = simulation.extra_seconds(problem) - solver.everything.extra_seconds(solver.problem)
    places = {place: node for node, place in enumerate(plain.places)}
    compressed = sorted(places[compression.forward.places[node]] for group in chosen for node in group)
    return replace(plan, compressed=tuple(compressed), peak=simulation.peak, extra_seconds=extra)
