"""The plan of a training forward under a budget, and the curve of budgets. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from optimum_memopt.engines.api.predictions import CurvePoint
from optimum_memopt.engines.compile.memory.footprint import Footprint

# Budgets of a curve.
_POINTS = 10


@dataclass(frozen=True)
class Plan:
    """The nodes that a forward saves for its backward, on the device or the host.

    Attributes:
        saved: nodes that the forward saves, in order.
        peak: bytes, exact as long as the device waits for no copy too late.
        extra_seconds: of what is recomputed, and of waiting for copies.
        seconds: of forward and backward without both.
        offloaded: nodes of `saved` that wait on the host.
        stall: seconds of `extra_seconds` that the device waits for copies.
        host_bytes: of pinned memory.
        graphs: the plan of each graph, where graph breaks split the forward; `saved` and `offloaded` are theirs.
    """

    saved: tuple[int, ...]
    peak: int
    extra_seconds: float
    seconds: float
    offloaded: tuple[int, ...] = ()
    stall: float = 0.0
    host_bytes: int = 0
    graphs: tuple["Plan", ...] = ()


class Infeasible(Exception):
    """No plan fits.

    Args:
        peak: the lowest that was found, bytes.
        holds: what is held at that moment, largest first: a few words, bytes.
    """

    def __init__(self, peak: int, holds: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(f"no plan fits; the lowest peak is {peak:,} bytes")
        self.peak, self.holds = peak, tuple(holds)


def solved(low: int, high: int, cheapest: Callable[[int], Plan], count: int = _POINTS) -> list[tuple[int, Plan]]:
    """Budgets at equal distances in bytes, and the fastest plan found that is within each; `low` is the lowest peak of
    recompute, `high` that with everything saved."""
    budgets = [low + (high - low) * number // (count - 1) for number in range(count)]
    # The solver is no exact one: what it finds for a larger budget may fit a smaller one, and be faster.
    plans = sorted(map(cheapest, budgets), key=lambda plan: (plan.extra_seconds, plan.peak))
    return [(budget, next(plan for plan in plans if plan.peak <= budget)) for budget in budgets]


def points_of(plans: Iterable[tuple[int, Plan]], outside: Footprint) -> tuple[CurvePoint, ...]:
    """The curve of plans by budget."""
    return tuple(point_of(plan, outside, replace(outside, activations=budget).peak) for budget, plan in plans)


def point_of(plan: Plan, outside: Footprint, budget: int | None = None) -> CurvePoint:
    """A plan on the curve for a step that may take `budget` bytes; None: what it takes."""
    peak = replace(outside, activations=plan.peak).peak
    return CurvePoint(peak if budget is None else budget, peak, plan.extra_seconds, plan.seconds)
