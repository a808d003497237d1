"""What an engine is told of the training run around a model."""

from collections.abc import Callable
from dataclasses import dataclass, field

from optimum_memopt.memory.optimizers import Optimizer


@dataclass(frozen=True)
class LargestBatch:
    """Sizes of the largest batch of a run.

    Attributes:
        rows: of a micro-batch.
        length: tokens of the longest row.
        lengths: tokens of the longest row of each batch of an epoch, for one order that the run's sampler may draw;
            empty where they are not known.
    """

    rows: int
    length: int
    lengths: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


@dataclass(frozen=True)
class Run:
    """What a training run holds beside a model.

    Attributes:
        optimizer: one that is planned where nothing is run; None before there is one.
        gradient_accumulation: gradients of several micro-batches add up.
        largest_batch: reads it from the training data; None where that cannot tell.
    """

    optimizer: Optimizer | None = None
    gradient_accumulation: bool = False
    largest_batch: Callable[[], LargestBatch | None] = lambda: None
