"""What budgets cost, from the plan with the lowest peak to everything saved. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from optimum_memopt.engines.api.predictions import CurvePoint
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.solver.plan import Plan

POINTS = 10


def solved(low: int, high: int, cheapest: Callable[[int], Plan], count: int = POINTS) -> list[tuple[int, Plan]]:
    """The plans of `count` budgets at equal distances: of all that are found, the fastest within each.

    Args:
        low: the lowest peak of recompute, bytes.
        high: the peak with everything saved, bytes.
        cheapest: finds the plan for so many bytes.
        count: of budgets.

    Returns:
        What the graphs may hold, in bytes, and the plan for it.
    """
    budgets = [low + (high - low) * number // (count - 1) for number in range(count)]
    found = list(map(cheapest, budgets))
    # The solver is no exact one: what it finds for a larger budget may fit a smaller one, and be faster.
    return [
        (
            allowed,
            min((plan for plan in found if plan.peak <= allowed), key=lambda plan: (plan.extra_seconds, plan.peak)),
        )
        for allowed in budgets
    ]


def points_of(plans: Iterable[tuple[int, Plan]], outside: Footprint) -> tuple[CurvePoint, ...]:
    """What `solved` found as a curve.

    Args:
        plans: see `solved`.
        outside: what a step holds beside the graphs.
    """
    return tuple(point_of(found, outside, replace(outside, activations=allowed).peak) for allowed, found in plans)


def point_of(found: Plan, outside: Footprint, budget: int | None = None) -> CurvePoint:
    """A plan on the curve.

    Args:
        found: the plan.
        outside: what a step holds beside the graphs.
        budget: bytes that the step may take; None: what it takes.
    """
    peak = replace(outside, activations=found.peak).peak
    return CurvePoint(peak if budget is None else budget, peak, found.extra_seconds, found.seconds)
