"""Plans compression within a budget: which saved activations wait in fp8, if that is cheaper than recompute. Pure."""

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

# Bytes beyond the budget to save by compression, as shares of the most that it can save.
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
# Share of a step's time that compression must save, since it is inexact.
_WORTH = 0.01
# Maximum number of groups, the dearest first, that are tried without their compression.
_TRIED = 16


@dataclass(frozen=True)
class Compression:
    """The compression that plans may mix with recompute.

    Attributes:
        forward: the graphs as one problem, with the conversions of all activations that may be compressed.
        deciding: operators of each run that derive integers or sizes from their operands, see `decided_from`.
    """

    forward: TapeProblem
    deciding: Sequence[frozenset[int]]

    @cached_property
    def numbers(self) -> tuple[dict[int, int], ...]:
        """Returns for each run a map from the nodes of its own problem to their numbers in the joint one."""
        return tuple(map(self.forward.numbers, range(len(self.forward.runs))))

    @cached_property
    def most(self) -> int:
        """Returns the bytes that compressing all saved activations would save."""
        problem = self.forward.problem
        return sum(_saving(problem, node) for node in problem.conversions)

    def simulated(self, plain: TapeProblem, plan: Plan) -> GraphSimulation:
        """Simulate the graphs under a plan for the problem without conversions; offloaded nodes stay on the
        device."""
        saved = self.forward.of_all(plain.of_runs(frozenset(plan.saved)))
        compressed = (
            self.numbers[run][node] for run, nodes in enumerate(plain.of_places(plan.compressed)) for node in nodes
        )
        return simulate(self.forward.problem, saved, frozenset(compressed))

    def groups(self, saved: Sequence[frozenset[int]]) -> list[tuple[int, ...]]:
        """Returns groups of activations to compress together, most bytes per second first.

        A group is the same activation in all runs of a graph, so that the graph keeps its number of partitions.

        Args:
            saved: nodes that each run saves, by the numbers of its own problem.
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
    """Returns the saved nodes from which the backward recomputes integers or sizes, see `analyzed_graph.decided_from`.

    Args:
        deciding: operators that turn numbers into integers, or whose number of results depends on values.
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
    """Returns the fastest plan with compression; None if none fits, or it gains less than `_WORTH` over `exact`.

    Args:
        plain: the solver's problem, without conversions.
        exact: the plan without compression; None: none fits.
        few: reduces a plan to few partitions of each graph, within a number of bytes.
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
    """Yields plans for larger budgets, each with its budget."""
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
    """Returns the plan for a larger budget with the least compression that brings it within this one; None if no
    compression does."""
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
