"""What is said of a training step that was not run. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from optimum_memopt.engines.step_timeline import StepTimeline
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    import torch

    from optimum_memopt.memory.capacity import Capacity


class Workload(Protocol):
    """What is trained."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""

    def with_rows(self, rows: int) -> "Workload":
        """The same with another batch size."""

    @property
    def way_out(self) -> str:
        """What to do about a model that cannot be traced; empty where nothing can be done."""

    def build(self) -> "tuple[torch.nn.Module, Mapping[str, Any]]":
        """A model in training mode and the keyword arguments of its forward, on fake tensors. Raises MemOptError."""


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


@dataclass(frozen=True)
class Frontier:
    """What budgets cost.

    Attributes:
        points: from the smallest budget to the largest.
        costs: where their times are from, as `roofline H100`.
        chosen: the plan in force; None where its time is not known.
    """

    points: tuple[CurvePoint, ...]
    costs: str
    chosen: CurvePoint | None = None


@dataclass(frozen=True)
class BatchPoint:
    """A step with so many rows.

    Attributes:
        batch_size: rows.
        peak: bytes that tensors ask for.
        activations: of it, a forward and its backward with the gradients that it returns.
        saved: of these, saved for backward.
        allocated: bytes of the blocks of torch's allocator on CUDA; None where it is not known.
        reserved: bytes that it takes of the device; None where it is not known.
    """

    batch_size: int
    peak: int
    activations: int
    saved: int
    allocated: int | None = None
    reserved: int | None = None


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
    def batches(self) -> Sequence[BatchPoint]:
        """Steps of other batch sizes; empty where nobody asked."""

    @property
    def costs(self) -> str:
        """Where the curve's times are from, as `roofline H100`."""

    @property
    def frontier(self) -> Frontier | None:
        """The curve with the plan's place on it; None where nobody asked."""

    @property
    def timeline(self) -> StepTimeline | None:
        """The step, operator by operator."""

    @property
    def peak_mib(self) -> float:
        """Of a step, what tensors ask for."""

    @property
    def allocated(self) -> int | None:
        """Bytes of the blocks of the device's allocator at the peak; None where it has none that is known."""

    @property
    def reserved(self) -> int | None:
        """Bytes that this allocator takes of the device; None where it has none that is known."""

    @property
    def capacity(self) -> "Capacity | None":
        """Memory of the device."""

    def to_text(self) -> str:
        """For a terminal."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
