"""What the user asked for, and what a training run holds beside its model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optimum_memopt.memory.optimizers import Optimizer
from optimum_memopt.plans.grammar import PlanConfig
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import Budget

if TYPE_CHECKING:
    pass


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


@dataclass(frozen=True)
class Selection:
    """What the user asked for: a config, a level from 1 on, a budget, or a plan file.

    `strict`: ids that do not exist are errors instead of remarks.
    """

    config: PlanConfig | None = None
    level: int = 0
    strict: bool = True
    budget: Budget | None = None
    plan: PlanFile | None = None

    @property
    def name(self) -> str:
        """`level 1`; empty where nothing was asked for."""
        if self.plan is not None:
            return "the plan file"
        if self.budget is not None:
            return f"the plan of budget {self.budget.text}"
        if self.level:
            return f"level {self.level}"
        return "" if self.config is None else f"config {self.config}"
