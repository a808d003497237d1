"""The cheapest set of nodes to save with which the exact peak of a graph is within a budget. Pure."""

import time
from dataclasses import dataclass

from optimum_memopt.engines.compile.budget.local_search import improve
from optimum_memopt.engines.compile.budget.problem import Problem
from optimum_memopt.engines.compile.budget.simulation import Simulation, held_at_peak, simulate
from optimum_memopt.engines.compile.budget.two_level import two_level
from optimum_memopt.engines.compile.budget.whole_graph import SMALL, solve_whole_graph

KEEPS_ALL, TWO_LEVEL, WHOLE_GRAPH = "everything is saved", "two-level", "whole graph"
LAYERS = "every layer is recomputed"


@dataclass(frozen=True)
class Solution:
    """What a graph saves under a budget.

    Attributes:
        saved: nodes of the problem, in order.
        peak: bytes of the graph, exact.
        extra_seconds: of what is recomputed.
        seconds: of the graph without.
        solver: who found it.
        solving_seconds: how long that took.
    """

    saved: tuple[int, ...]
    peak: int
    extra_seconds: float
    seconds: float
    solver: str
    solving_seconds: float


@dataclass(frozen=True)
class Floor:
    """No plan fits.

    Attributes:
        peak: the lowest that was found, bytes.
        holds: what is held at that moment, largest first: a few words, bytes.
    """

    peak: int
    holds: tuple[tuple[str, int], ...]


def solve(problem: Problem, budget: int) -> Solution | Floor:
    """The plan with the least time for recompute of all whose peak fits; of equal ones that with the lowest peak.

    Args:
        problem: a joint graph.
        budget: bytes that the graph's forward and backward may hold.
    """
    begin = time.perf_counter()
    everything = simulate(problem, problem.closure(problem.activations))
    candidates = [(KEEPS_ALL, everything)]
    menus = None
    if everything.peak > budget:
        menus = two_level(problem)
        if (found := menus.solve(budget)) is not None:
            candidates.append((TWO_LEVEL, found))
        candidates.append((LAYERS, _layers_recomputed(problem)))
        # It takes longer, and wins in small graphs and where the other one finds nothing.
        if found is None or sum(problem.is_forward) < SMALL:
            whole = solve_whole_graph(problem, budget, found or everything)
            candidates += [(WHOLE_GRAPH, whole)] if whole is not None else []
    fitting = [(solver, found) for solver, found in candidates if found.peak <= budget]
    if not fitting and menus is not None:
        lowest = min(menus.lowest(), *(found for _, found in candidates), key=lambda found: found.peak)
        if lowest.peak > budget:
            return Floor(lowest.peak, _holders(problem, lowest))
        fitting.append((TWO_LEVEL, lowest))
    solver, best = min(fitting, key=lambda pair: (pair[1].extra_seconds(problem), pair[1].peak))
    if everything.peak > budget:
        best = improve(problem, best, budget)
    base = everything.extra_seconds(problem)
    total = sum(problem.seconds[node] for node in (*everything.forward.order, *everything.backward.order))
    return Solution(
        saved=tuple(sorted(best.saved)),
        peak=best.peak,
        extra_seconds=best.extra_seconds(problem) - base,
        seconds=total,
        solver=solver,
        solving_seconds=time.perf_counter() - begin,
    )


def lowest_peak(problem: Problem) -> Simulation:
    """The plan with the lowest peak that is found."""
    return min(two_level(problem).lowest(), _layers_recomputed(problem), key=lambda found: found.peak)


def _layers_recomputed(problem: Problem) -> Simulation:
    """Every layer recomputed from its input, as level 1 has it."""
    outside = {node for node in problem.activations if not problem.layers[node] or problem.is_statistic[node]}
    return simulate(problem, problem.closure(outside | problem.boundaries))


def _holders(problem: Problem, found: Simulation, most: int = 4) -> tuple[tuple[str, int], ...]:
    """The largest groups of what is held at the peak: gradients, and others by where they are computed."""
    gradients = {problem.roots[node] for node in problem.backward_outputs}
    groups: dict[str, int] = {}
    for node, size in held_at_peak(problem, found, found.backward.peak > found.forward.peak).items():
        where = "gradients of parameters" if node in gradients else _place(problem, node)
        groups[where] = groups.get(where, 0) + size
    return tuple(sorted(groups.items(), key=lambda item: -item[1])[:most])


def _place(problem: Problem, node: int) -> str:
    return f"layer {problem.layers[node]}" if problem.layers[node] else f"{problem.kinds[node]} outside of layers"
