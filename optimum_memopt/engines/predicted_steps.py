"""What training steps of one model take under several plans and with any micro-batch, without running one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

# What bounds an operator, or a step.
COMPUTE, BANDWIDTH, LAUNCHES, OPTIMIZER = "compute", "memory bandwidth", "launches", "optimizer"
COPIES = "copies to the host"


@dataclass(frozen=True)
class StepPlan:
    """A way to train a model.

    Attributes:
        name: `level 1`, as the advice shows it.
        flags: that ask for it, without that of the loss; empty where it is not one of the package.
        chunks_loss: the loss is computed without its logits.
        is_own: one of the package's; else it is shown to compare with.
    """

    name: str
    flags: tuple[str, ...] = ()
    chunks_loss: bool = False
    is_own: bool = True


@dataclass(frozen=True)
class PredictedStep:
    """One optimizer step.

    Attributes:
        peak: bytes.
        seconds: of the forward and backward of one micro-batch, by what bounds their operators.
        accumulating: seconds of adding the gradients of one micro-batch to those before.
        optimizer: seconds of clipping the gradients and of the optimizer's step.
        recomputing: seconds of `seconds` that are for what is recomputed.
        host_bytes: that activations take on the host.
    """

    peak: int
    seconds: Mapping[str, float]
    accumulating: float
    optimizer: float
    recomputing: float = 0.0
    host_bytes: int = 0

    @property
    def micro_batch(self) -> float:
        """Seconds of the forward and backward of one micro-batch."""
        return sum(self.seconds.values())

    def total(self, accumulation: int) -> float:
        """Seconds of an optimizer step of so many micro-batches."""
        return sum(self.by_bound(accumulation).values())

    def by_bound(self, accumulation: int) -> dict[str, float]:
        """Seconds of an optimizer step of so many micro-batches, by what bounds them."""
        found = {bound: seconds * accumulation for bound, seconds in self.seconds.items()}
        return {**found, OPTIMIZER: self.optimizer + self.accumulating * (accumulation - 1)}


class StepPredictor(Protocol):
    """Predicts steps of one model.

    Attributes:
        model: name of its class.
        device: `H100`, `cpu`.
        costs: where seconds are from, as `roofline H100`.
        budget: bytes that the peak of a step must not pass.
        tokens: of a row; 0 where rows have no tokens.
        plans: those that there are for this model.
    """

    @property
    def model(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def costs(self) -> str: ...

    @property
    def budget(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def plans(self) -> tuple[StepPlan, ...]: ...

    def fits(self, plan: StepPlan, rows: int, accumulates: bool) -> bool:
        """Whether the peak of a step is within the budget.

        Args:
            plan: one of `plans`.
            rows: of a micro-batch.
            accumulates: gradients of several micro-batches add up.
        """

    def step(self, plan: StepPlan, rows: int, accumulates: bool) -> PredictedStep:
        """A step that fits; arguments as in `fits`."""

    def lowest(self, plan: StepPlan, accumulates: bool) -> int:
        """The peak with a micro-batch of one row, in bytes."""

    def evaluation(self, rows: int) -> int:
        """The peak of a forward without gradients between two training steps, in bytes."""
