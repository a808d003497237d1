"""What is said of a training step that was not run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable


@dataclass(frozen=True)
class CurvePoint:
    """The plan of one budget.

    Attributes:
        budget: bytes that the step may take.
        peak: bytes that it takes.
        extra_seconds: of what is recomputed.
        seconds: of forward and backward without.
    """

    budget: int
    peak: int
    extra_seconds: float
    seconds: float

    @property
    def extra_time(self) -> float:
        """Extra time as a share of the step's."""
        return self.extra_seconds / self.seconds if self.seconds else 0.0


class Estimate(Protocol):
    """What a training step is predicted to hold, without running it."""

    @property
    def table(self) -> PlanTable:
        """The plan table of the traced graph."""

    @property
    def plan(self) -> PlanFile | None:
        """What is on, activation by activation."""

    @property
    def curve(self) -> Sequence[CurvePoint]:
        """What budgets cost, from the smallest to the largest; empty where nobody asked."""

    @property
    def costs(self) -> str:
        """Where the curve's times are from, as `roofline H100`."""

    def to_text(self) -> str:
        """For a terminal."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
