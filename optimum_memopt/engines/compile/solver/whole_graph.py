"""Plans of the whole graph: small changes of one that are simulated one by one, which no linear limit of bytes can
express, and an integer program whose limits come from simulations. Pure."""

from collections.abc import Iterator

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import Simulation, held_at_peak, simulate
from optimum_memopt.engines.compile.solver.cut import GAP, MEGA, Cut, cut_of, matrix

# Operators that all simulations of an improvement may run: a quarter of a second.
_WORK = 100_000
# Programs that are solved at most, and variables above which none is: it would take minutes.
_ROUNDS, _LARGEST = 12, 2500
# Operators of a forward up to which it is quick enough to be asked in any case.
SMALL = 100
# The shares of a peak that are asked for next where that one was found. With the gap any plan will do: it is found at
# once, or is not there.
_STEPS, _ANY = (0.95, 0.99, 0.999), 1.0


def improve(problem: Problem, best: Simulation, budget: int) -> Simulation:
    """The plan after all changes that make it faster within the budget, as far as the work allows."""
    remaining = _WORK // len(problem.names)
    seconds = best.extra_seconds(problem)
    seen = {best.saved}
    is_better = True
    while is_better:
        is_better = False
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
                best, seconds, is_better = changed, changed.extra_seconds(problem), True
                break
    return best


def _changes(problem: Problem, plan: Simulation) -> Iterator[frozenset[int]]:
    """One more saved, the dearest to recompute first; one in exchange for another; one less."""
    missing = [
        root
        for root in sorted(set(plan.recomputed))
        if problem.roots[root] == root and problem.is_tensor[root] and problem.bytes[root]
    ]
    missing.sort(key=lambda root: -problem.seconds[root])
    saved = [node for node in sorted(plan.saved) if not problem.is_kept[node]]
    yield from (plan.saved | {root} for root in missing)
    yield from (plan.saved - {node} | {root} for root in missing for node in saved)
    yield from (plan.saved - {node} for node in saved)


def lowest_of_whole_graph(problem: Problem, lowest: Simulation) -> Simulation:
    """The plan with the lowest peak that is found below `lowest`, within a thousandth of where the search ends."""
    for step in _STEPS:
        while (lower := solve_whole_graph(problem, int(step * lowest.peak), lowest, _ANY)) is not None:
            lowest = lower
    return lowest


def solve_whole_graph(problem: Problem, budget: int, start: Simulation, gap: float = GAP) -> Simulation | None:
    """The first plan found whose simulated peak is within the budget, which is the fastest; None where none was.

    Args:
        start: a plan, whose peak is the first limit.
    """
    nodes = [node for node, is_forward in enumerate(problem.is_forward) if is_forward and not problem.is_number[node]]
    cut = cut_of(problem, nodes)
    if cut is None or len(cut.microseconds) > _LARGEST:
        return None
    limits: list[tuple[dict[int, float], float]] = []
    plan = start
    for _ in range(_ROUNDS):
        limits += [_limit(problem, cut, plan, budget, in_backward) for in_backward in (True, False)]
        rows, most = zip(*limits, strict=True)
        solution = cut.within(matrix(rows, len(cut.microseconds)), np.array(most), gap)
        if solution is None:
            return None
        plan = simulate(problem, problem.closure(cut.saved(solution)))
        if plan.peak <= budget:
            return plan
    return None


def _limit(
    problem: Problem, cut: Cut, plan: Simulation, budget: int, in_backward: bool
) -> tuple[dict[int, float], float]:
    """Megabytes of the program's variables held at the highest point of a run, and how many there may be.

    What is held and is no choice is taken off the budget. What could be saved, and is not, counts too: if it is saved,
    it is held there.
    """
    run = plan.backward if in_backward else plan.forward
    held = held_at_peak(problem, plan, in_backward)
    top = run.held.index(run.peak)
    row: dict[int, float] = {}
    # Without the workspace, and what other graphs hold.
    rest = budget - (run.peak - sum(held.values()))
    for node, size in held.items():
        if node in plan.saved:
            column = cut.roots.get(node)
        else:
            source = problem.picks[node]
            column = cut.operators.get(node if source is None else source) if in_backward else None
        if column is None:
            rest -= size
        else:
            row[column] = row.get(column, 0.0) + size / MEGA
    if in_backward:
        # A saved root is held until the last of the backward's own operators that reads it.
        here = next((node for node in run.order[top:] if problem.is_backward[node]), len(problem.names))
        last = {problem.roots[read]: node for node in problem.backward_operators for read in problem.reads[node]}
    repeats = problem.siblings.runs - 1
    for node, column in cut.roots.items():
        is_held_if_saved = last.get(node, -1) >= here if in_backward else node <= run.order[top]
        if node not in held and is_held_if_saved:
            row[column] = problem.bytes[node] / MEGA
        if repeats:
            # Each saves the same.
            row[column] = row.get(column, 0.0) + repeats * problem.bytes[node] / MEGA
            rest += repeats * problem.bytes[node] * (node in plan.saved)
    return row, rest / MEGA
