"""Improves a plan by small changes that are simulated one by one: what no linear limit of bytes can express."""

from collections.abc import Iterator

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import Simulation, held_at_peak, simulate
from optimum_memopt.engines.compile.solver.cut import GAP, MEGA, Cut, cut_of, matrix

# Operators that all simulations together may run: a quarter of a second.
_WORK = 100_000


def improve(problem: Problem, found: Simulation, budget: int) -> Simulation:
    """The plan after all changes that make it faster within the budget, as far as the work allows.

    Args:
        problem: a joint graph.
        found: a plan within the budget.
        budget: bytes.
    """
    left = _WORK // len(problem.names)
    best, seconds = found, found.extra_seconds(problem)
    seen = {found.saved}
    is_better = True
    while is_better:
        is_better = False
        for kept in _changes(problem, best):
            saved = problem.closure(kept)
            if saved in seen:
                continue
            seen.add(saved)
            if not left:
                return best
            left -= 1
            changed = simulate(problem, saved)
            if changed.peak <= budget and changed.extra_seconds(problem) < seconds - 1e-12:
                best, seconds, is_better = changed, changed.extra_seconds(problem), True
                break
    return best


def _changes(problem: Problem, found: Simulation) -> Iterator[frozenset[int]]:
    """One more saved, the dearest to recompute first; one in exchange for another; one less."""
    recomputed = frozenset(found.recomputed)
    missing = [
        root
        for root in sorted(recomputed)
        if problem.roots[root] == root and problem.is_tensor[root] and problem.bytes[root]
    ]
    missing.sort(key=lambda root: -problem.seconds[root])
    saved = [node for node in sorted(found.saved) if not problem.is_kept[node]]
    yield from (found.saved | {root} for root in missing)
    yield from (found.saved - {other} | {root} for root in missing for other in saved)
    yield from (found.saved - {other} for other in saved)


# Programs that are solved at most, and variables above which none is: it would take minutes.
_ROUNDS, _LARGEST = 12, 2500
# Variables up to which it is quick enough to be asked in any case.
SMALL = 100
# Of a peak, what is asked for next where that one was found. With the gap any plan will do: it is found at once, or is
# not there.
_STEPS, _ANY = (0.95, 0.99, 0.999), 1.0


def lowest_of_whole_graph(problem: Problem, start: Simulation) -> Simulation:
    """The plan with the lowest peak that is found, within a thousandth of where the search ends.

    Args:
        problem: a joint graph.
        start: the plan that it begins with.
    """
    found = start
    for step in _STEPS:
        while (lower := solve_whole_graph(problem, int(step * found.peak), found, _ANY)) is not None:
            found = lower
    return found


def solve_whole_graph(problem: Problem, budget: int, start: Simulation, gap: float = GAP) -> Simulation | None:
    """The first plan found whose simulated peak is within the budget, which is the fastest; None where none was.

    Args:
        problem: a joint graph.
        budget: bytes.
        start: a plan, whose peak is the first limit.
        gap: see `Cut.within`.
    """
    nodes = [node for node, is_forward in enumerate(problem.is_forward) if is_forward and not problem.is_number[node]]
    cut = cut_of(problem, nodes)
    if cut is None or len(cut.microseconds) > _LARGEST:
        return None
    rows: list[dict[int, float]] = []
    most: list[float] = []
    found = start
    for _ in range(_ROUNDS):
        for row, rest in (_limit(problem, cut, found, budget, in_backward) for in_backward in (True, False)):
            rows.append(row)
            most.append(rest)
        solution = cut.within(matrix(rows, len(cut.microseconds)), np.array(most), gap)
        if solution is None:
            return None
        found = simulate(problem, problem.closure(cut.saved(solution)))
        if found.peak <= budget:
            return found
    return None


def _limit(
    problem: Problem, cut: Cut, found: Simulation, budget: int, in_backward: bool
) -> tuple[dict[int, float], float]:
    """What is held at the highest point of a run, as megabytes of the program's variables, and how many there may be.

    What is held and is no choice is taken off the budget. What could be saved, and is not, counts too: if it is saved,
    it is held there.
    """
    run = found.backward if in_backward else found.forward
    held = held_at_peak(problem, found, in_backward)
    top = run.order[run.held.index(run.peak)]
    row: dict[int, float] = {}
    # Without the workspace, and what other graphs hold.
    rest = budget - (run.peak - sum(held.values()))
    other_runs = problem.siblings.runs - 1
    for node, size in held.items():
        source = problem.picks[node]
        is_saved = node in found.saved
        operator = node if source is None else source
        column = cut.columns.get(node) if is_saved else cut.operator_columns.get(operator) if in_backward else None
        if column is None:
            rest -= size
        else:
            row[column] = row.get(column, 0.0) + size / MEGA
    if in_backward:
        # A saved root is held until the last of the backward's own operators that reads it.
        behind = (node for node in run.order[run.held.index(run.peak) :] if problem.is_backward[node])
        here, last = next(behind, len(problem.names)), _last_reads(problem)
    for node, column in cut.columns.items():
        is_held_if_saved = last.get(node, -1) >= here if in_backward else node <= top
        if node not in held and is_held_if_saved:
            row[column] = problem.bytes[node] / MEGA
        if other_runs:
            # Each saves the same.
            row[column] = row.get(column, 0.0) + other_runs * problem.bytes[node] / MEGA
            rest += other_runs * problem.bytes[node] * (node in found.saved)
    return row, rest / MEGA


def _last_reads(problem: Problem) -> dict[int, int]:
    """The last of the backward's own operators that reads each root."""
    return {problem.roots[read]: node for node in problem.backward_operators for read in problem.reads[node]}
