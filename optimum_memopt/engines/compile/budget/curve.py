"""What budgets cost, from the plan with the lowest peak to everything saved. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from optimum_memopt.engines.compile.budget.mixed import Host, Mixed, cheapest
from optimum_memopt.engines.compile.budget.simulation import simulate
from optimum_memopt.engines.compile.budget.solve import Floor, Solution, Solver
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.estimates import CurvePoint

POINTS = 10


def solved(solver: Solver, host: Host | None = None, count: int = POINTS) -> list[tuple[int, Solution | Mixed]]:
    """The plans of `count` budgets at equal distances, from the lowest peak of recompute to that of everything saved.

    Args:
        solver: of the joint graph.
        host: where activations may wait; None: nowhere.
        count: of budgets.

    Returns:
        What the graph may hold, in bytes, and the plan for it.
    """
    low, high = solver.lowest.peak, solver.everything.peak
    found = []
    for number in range(count):
        allowed = low + (high - low) * number // (count - 1)
        solution = cheapest(solver, allowed, host)
        assert not isinstance(solution, Floor)
        found.append((allowed, solution))
    return found


def points_of(plans: Iterable[tuple[int, Solution | Mixed]], outside: Footprint) -> tuple[CurvePoint, ...]:
    """What `solved` found as a curve.

    Args:
        plans: see `solved`.
        outside: what a step holds beside the graph.
    """
    return tuple(point_of(found, outside, replace(outside, activations=allowed).peak) for allowed, found in plans)


def point_of(found: Solution | Mixed, outside: Footprint, budget: int) -> CurvePoint:
    """A solver's plan on the curve.

    Args:
        found: the plan.
        outside: what a step holds beside the graph.
        budget: bytes that the step may take.
    """
    peak = replace(outside, activations=found.peak).peak
    return CurvePoint(budget, peak, found.extra_seconds, found.seconds)


def point_of_budget(solver: Solver, outside: Footprint, budget: int, host: Host | None = None) -> CurvePoint | None:
    """The plan of a budget on the curve; None where nothing fits."""
    found = cheapest(solver, outside.activations_within(budget), host)
    return None if isinstance(found, Floor) else point_of(found, outside, budget)


def point_of_plan(solver: Solver, outside: Footprint, saved: Collection[int]) -> CurvePoint:
    """Any plan on the curve.

    Args:
        solver: of the joint graph.
        outside: what a step holds beside the graph.
        saved: nodes that the plan saves for backward.
    """
    problem = solver.problem
    found = simulate(problem, problem.saving(saved))
    peak = replace(outside, activations=found.peak).peak
    return CurvePoint(peak, peak, solver.extra_seconds(found), solver.seconds)
