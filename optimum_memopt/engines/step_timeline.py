"""What a training step holds while each of its operators runs, by category. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

# From the bottom of a picture to its top: what is always held comes first.
CATEGORIES = OTHER, PARAMETERS, OPTIMIZER, BATCH, GRADIENTS, SAVED, RECOMPUTED, TEMPORARY = (
    "other",
    "parameters",
    "optimizer states",
    "batch",
    "gradients",
    "saved activations",
    "recomputed",
    "temporary",
)
# Borders of a step's phases, as `--log_memory_phases` names them.
PRE_FORWARD, POST_FORWARD, PRE_BACKWARD, POST_BACKWARD, POST_OPTIMIZER_STEP = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "post_optimizer_step",
)


@dataclass(frozen=True)
class Group:
    """Tensors of one kind that are held at the same time.

    Attributes:
        category: one of `CATEGORIES`.
        name: cluster id of saved activations that have one, `Gelu+`, else an operator; empty for a whole category.
        count: of tensors; 0 where they were not counted.
        bytes: of all of them.
        layers: paths of the transformer layers that they were computed in.
    """

    category: str
    name: str
    count: int
    bytes: int
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Phase:
    """The end of a phase of the step, in bytes.

    Attributes:
        name: `post_forward`.
        held: at that moment.
        peak: the most since the phase before.
    """

    name: str
    held: int
    peak: int


@dataclass(frozen=True)
class StepTimeline:
    """A training step, predicted; tuples have an entry an operator, in the order in which they run.

    Attributes:
        operators: names of the forward's, the backward's, and last the optimizer's step.
        layers: path of the transformer layer that each belongs to, empty outside of all.
        held: bytes by category while each runs; every category of `CATEGORIES` is there.
        backward_at: index of the backward's first operator.
        alive: what is held at the peak, largest first.
        phases: what is held at their borders.
        sizes: of the batch, by the plan table's names.
        counts: what an entry is: `operators`, or `allocations` of a compiler's program.
    """

    operators: tuple[str, ...]
    layers: tuple[str, ...]
    held: Mapping[str, tuple[int, ...]]
    backward_at: int
    alive: tuple[Group, ...]
    phases: tuple[Phase, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: str = "operators"

    @cached_property
    def total(self) -> tuple[int, ...]:
        """Bytes while each operator runs."""
        return tuple(map(sum, zip(*self.held.values(), strict=True)))

    @property
    def peak(self) -> int:
        """The most that is held, in bytes: the predicted peak of the step."""
        return max(self.total)

    @property
    def peak_at(self) -> int:
        """Index of the first operator at which most is held."""
        return self.total.index(self.peak)

    @property
    def optimizer_at(self) -> int:
        """Index of the optimizer's step."""
        return len(self.operators) - 1

    @property
    def peak_phase(self) -> str:
        """Where the peak is: `forward`, `backward` or `optimizer`."""
        if self.peak_at == self.optimizer_at:
            return "optimizer"
        return "forward" if self.peak_at < self.backward_at else "backward"
