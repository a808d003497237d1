"""The plans that were asked for, the step that they are for, and the run that trains under them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from optimum_memopt.memory.optimizers import DEFAULT, Optimizer
from optimum_memopt.plans.grammar import PlanConfig
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import Budget


@dataclass(frozen=True)
class StepSpec:
    """How a step that is planned runs.

    Attributes:
        device: whose memory and rates count, as `h100` or a JSON file; None: this machine's.
        compiler: whose graphs, `inductor` or `aot_eager`; None: the one that would train.
        autocast: `bfloat16` or `float16`; empty: float32.
        optim: Trainer's name of the optimizer.
        gradient_accumulation_steps: micro-batches of a step.
    """

    device: str | None = None
    compiler: str | None = None
    autocast: str = ""
    optim: str = DEFAULT
    gradient_accumulation_steps: int = 1


THIS_MACHINE = StepSpec()


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
    """A training run beside its model.

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
    """The plan that was asked for: a config, a level from 1 on, a budget, or a plan file.

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
