"""Improves a plan by small changes that are simulated one by one: what no linear limit of bytes can express."""

from collections.abc import Iterator

from optimum_memopt.engines.compile.budget.problem import Problem
from optimum_memopt.engines.compile.budget.simulation import Simulation, simulate

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
