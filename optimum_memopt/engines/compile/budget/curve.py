"""What budgets cost, from the plan with the lowest peak to everything saved. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from optimum_memopt.engines.compile.budget.mixed import Mixed
from optimum_memopt.engines.compile.budget.solve import Floor, Solution
from optimum_memopt.engines.compile.budget.together import Plans
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.estimates import CurvePoint

POINTS = 10


def solved(
    low: int, high: int, cheapest: Callable[[int], Solution | Mixed | Plans | Floor], count: int = POINTS
) -> list[tuple[int, Solution | Mixed | Plans]]:
    """The plans of `count` budgets at equal distances.

    Args:
        low: the lowest peak of recompute, bytes.
        high: the peak with everything saved, bytes.
        cheapest: finds the plan for so many bytes.
        count: of budgets.

    Returns:
        What the graphs may hold, in bytes, and the plan for it.
    """
    found = []
    for number in range(count):
        allowed = low + (high - low) * number // (count - 1)
        solution = cheapest(allowed)
        assert not isinstance(solution, Floor)
        found.append((allowed, solution))
    return found


def points_of(plans: Iterable[tuple[int, Solution | Mixed | Plans]], outside: Footprint) -> tuple[CurvePoint, ...]:
    """What `solved` found as a curve.

    Args:
        plans: see `solved`.
        outside: what a step holds beside the graphs.
    """
    return tuple(point_of(found, outside, replace(outside, activations=allowed).peak) for allowed, found in plans)


def point_of(found: Solution | Mixed | Plans, outside: Footprint, budget: int | None = None) -> CurvePoint:
    """A plan on the curve.

    Args:
        found: the plan.
        outside: what a step holds beside the graphs.
        budget: bytes that the step may take; None: what it takes.
    """
    peak = replace(outside, activations=found.peak).peak
    return CurvePoint(peak if budget is None else budget, peak, found.extra_seconds, found.seconds)
