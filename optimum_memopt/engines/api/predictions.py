"""Predictions of training steps, and the workloads that they are for. Pure."""

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tabulate import tabulate

from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import gib_text

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from optimum_memopt.memory.capacity import Capacity
    from optimum_memopt.memory.optimizers import OptimizerMemory


# From the bottom of a picture to its top: what is always held comes first.
CATEGORIES = OTHER, PARAMETERS, OPTIMIZER, BATCH, GRADIENTS, SAVED, OUTPUTS, RECOMPUTED, TEMPORARY = (
    "other",
    "parameters",
    "optimizer states",
    "batch",
    "gradients",
    "saved activations",
    "outputs and variables",
    "recomputed",
    "temporaries",
)
# Borders of a step's phases, as `--log_memory_phases` names them.
PRE_FORWARD, POST_FORWARD, PRE_BACKWARD, POST_BACKWARD, POST_OPTIMIZER_STEP = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "post_optimizer_step",
)


# Groups of tensors that are shown of each category, and bytes of the smallest.
_GROUPS, _SHOWN = 3, 2**20
# The number of a layer in its list, before that of a repeated call: `layer.0@1`.
_NUMBER = re.compile(r"\d+(?:@\d+)?$")


def equal_layers(layer: str) -> str:
    """`model.layers.*` of `model.layers.3`: the path that all layers of a list share."""
    return _NUMBER.sub("*", layer)


@dataclass(frozen=True)
class Group:
    """Tensors of one kind that are held at the same time.

    Attributes:
        category: one of `CATEGORIES`.
        name: cluster id of saved activations that have one, `Gelu+`, else an operator; empty for a whole category.
        count: of tensors; 0 where they were not counted.
        layers: paths of the transformer layers that they were computed in, all of one list.
        module: path of the module that computes them, within its layer; outside of layers in the model.
    """

    category: str
    name: str
    count: int
    bytes: int
    layers: tuple[str, ...] = ()
    module: str = ""

    @property
    def where(self) -> str:
        """`model.layers.3.mlp`; of several layers `model.layers.*.mlp x 16`."""
        layer = self.layers[0] if len(self.layers) == 1 else "".join(map(equal_layers, self.layers[:1]))
        path = ".".join(filter(None, (layer, self.module)))
        return f"{path} x {len(self.layers)}" if len(self.layers) > 1 else path


@dataclass(frozen=True)
class Phase:
    """The end of a phase of the step, in bytes.

    Attributes:
        name: `post_forward`.
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
        """The most bytes that are held: the predicted peak of the step."""
        return max(self.total)

    @property
    def peak_at(self) -> int:
        return self.total.index(self.peak)

    @property
    def optimizer_at(self) -> int:
        return len(self.operators) - 1

    @property
    def peak_phase(self) -> str:
        """Where the peak is: `forward`, `backward` or `optimizer`."""
        if self.peak_at == self.optimizer_at:
            return "optimizer"
        return "forward" if self.peak_at < self.backward_at else "backward"

    @property
    def peak_place(self) -> str:
        """`in the backward, at mm of model.layers.3`."""
        layer = self.layers[self.peak_at]
        return f"in the {self.peak_phase}, at {self.operators[self.peak_at]}{f' of {layer}' if layer else ''}"

    def held_text(self, name: str) -> str:
        """The largest groups of tensors at the peak of what has this name."""
        rows = []
        for category in dict.fromkeys(group.category for group in self.alive):
            names: Counter[str] = Counter()
            for group in self.alive:
                names[group.name] += group.bytes * (group.category == category)
            named = (f"{name} {gib_text(size)}" for name, size in names.most_common() if name and size >= _SHOWN)
            if (total := names.total()) >= _SHOWN:
                rows.append((total, category, gib_text(total), ", ".join(itertools.islice(named, _GROUPS))))
        rows.sort(key=operator.itemgetter(0), reverse=True)
        grid = tabulate([row for _, *row in rows], tablefmt="plain", disable_numparse=True)
        return f"{name} holds at its peak, {self.peak_place}:\n{grid}"

    def at_peak(self, peak: int) -> tuple[Group, ...]:
        """The tensors at the peak, largest first, whose bytes add up to `peak`.

        Args:
            peak: of the blocks that tensors get from torch's allocator on CUDA, elsewhere `self.peak`.
        """
        rest = Group(OTHER, "blocks of the allocator beyond their tensors", 0, peak - self.peak)
        return tuple(sorted((*self.alive, *([rest] if rest.bytes else [])), key=lambda group: -group.bytes))

    def peak_text(self, peak: int) -> str:
        """A table of `at_peak`."""
        rows = [
            (each.category, each.name, each.where, each.count or "", f"{each.bytes:,}", gib_text(each.bytes))
            for each in self.at_peak(peak)
        ]
        rows.append(("predicted peak", "", "", "", f"{peak:,}", gib_text(peak)))
        headers = ("held", "row or operator", "module", "tensors", "bytes", "size")
        align = ("left", "left", "left", "right", "right", "right")
        grid = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)
        return f"Tensors at the predicted peak, {self.peak_place}:\n{grid}"


class Workload(Protocol):
    """A model, and a batch of it, that are planned for before they are built.

    Attributes:
        batch_size: rows of a batch.
        tokens: of a row; 0: as many as the batch has, if any.
        suggestion: a way to get figures of a model that cannot be traced; empty where there is none.
        values: inputs whose values are known, on the CPU: models branch on those of masks, of which one that is not
            known counts as one with padding.
    """

    @property
    def batch_size(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def suggestion(self) -> str: ...
    @property
    def values(self) -> "Mapping[str, torch.Tensor]": ...

    def with_rows(self, rows: int) -> "Workload": ...

    def build(self) -> "tuple[torch.nn.Module, Mapping[str, Any]]":
        """A model in training mode and the keyword arguments of its forward, on fake tensors. Raises MemOptError."""


@dataclass(frozen=True)
class ModelOfRun:
    """A model that is about to train, on the device that trains it; it is left as it is.

    Attributes:
        make_batch: the arguments of its forward in a batch of that many rows.
        tokens: of the longest row; 0: as many as the batches have.
        reads_logits: more of the model's outputs is read than its loss.
    """

    model: "torch.nn.Module"
    make_batch: Callable[[int], Mapping[str, Any]]
    tokens: int
    reads_logits: bool


@dataclass(frozen=True)
class PlannedDevice:
    """The device that is planned for.

    Attributes:
        lacks: half-precision dtypes that it does not compute in, as `bfloat16`.
    """

    name: str
    memory: "Capacity"
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurvePoint:
    """The plan of one budget, in bytes.

    Attributes:
        extra_seconds: of what is recomputed.
        seconds: of forward and backward without.
    """

    budget: int
    peak: int
    extra_seconds: float
    seconds: float

    @property
    def extra_time(self) -> float:
        """As a share of the step's."""
        return self.extra_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Frontier:
    """The extra time of budgets.

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
    """A step of one batch size.

    Attributes:
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


@dataclass(frozen=True)
class StepEstimate:
    """The predicted memory of a training step that is not run.

    Attributes:
        parts: bytes by name.
        peak_mib: of the bytes that tensors ask for.
        attention: transformers' name of the assumed attention implementation.
        assumes: what the prediction assumes, and how exact it is.
        frontier: of budgets, with the plan; None where nobody asked.
        batches: steps of other batch sizes; empty where nobody asked.
        ways: steps of the engine without a plan, under level 1 and under what is selected; empty where nobody asked.
        allocated: bytes of the blocks of torch's allocator on CUDA; None where it is not known.
        reserved: bytes that it takes of the device; None where it is not known.
    """

    table: PlanTable
    parts: dict[str, int]
    peak_mib: float
    device: str
    compiler: str
    attention: str
    assumes: str = field(repr=False)
    plan: PlanFile | None = field(default=None, repr=False)
    frontier: Frontier | None = None
    batches: tuple[BatchPoint, ...] = ()
    ways: "tuple[Way, ...]" = field(default=(), repr=False)
    timeline: StepTimeline | None = field(default=None, repr=False)
    allocated: int | None = None
    reserved: int | None = None
    capacity: "Capacity | None" = field(default=None, repr=False)

    @property
    def peak(self) -> int:
        """Bytes that a budget bounds: what tensors ask for, or the allocator's blocks where they are more."""
        return max(round(self.peak_mib * MIB), self.allocated or 0)

    def to_text(self) -> str:
        """The table, of plans or of batch sizes, the curve, and what the prediction assumes."""
        curve = f"\n\n{_curve_text(self.frontier)}\n" if self.frontier else ""
        table = self.table.to_text()
        if self.batches:
            table = f"{self.table.header[0]}\n{_batches_text(self.batches, self.capacity)}"
        elif self.capacity is not None:
            table = f"{table}\nOn {self.device} it {self.capacity.verdict(self.peak)}"
        return f"{table}{curve}\n{self.assumes}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; without the plan, which is a file of its own, and the timeline, which is a picture."""
        entries = asdict(replace(self, plan=None, timeline=None, capacity=None, ways=(), frontier=None))
        for name in ("assumes", "plan", "timeline", "frontier", "capacity", "ways"):
            del entries[name]
        frontier = self.frontier or Frontier((), "")
        return {**entries, "curve": [asdict(point) for point in frontier.points], "costs": frontier.costs}


def _batches_text(points: Sequence[BatchPoint], memory: "Capacity | None") -> str:
    sizes = {name: name for name in ("allocated", "reserved", "activations")}
    rows = [
        {
            "batch size": str(point.batch_size),
            "predicted peak": gib_text(point.peak),
            **(fits_cell(memory, max(point.peak, point.allocated or 0)) if memory is not None else {}),
            **{title: gib_text(size) for title, name in sizes.items() if (size := getattr(point, name)) is not None},
            "saved for backward": gib_text(point.saved),
        }
        for point in points
    ]
    return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True, stralign="right")


def fits_cell(memory: "Capacity", peak: int | None) -> dict[str, str]:
    """The column of a table that says whether a step with this peak fits into a device's memory; None: not known."""
    verdict = "-" if peak is None else memory.verdict(peak).partition(":")[0]
    return {f"in {gib_text(memory.available)}": verdict}


def _curve_text(frontier: Frontier) -> str:
    rows = [
        {"budget": gib_text(point.budget), "predicted peak": gib_text(point.peak), "time": f"{point.extra_time:+.1%}"}
        for point in reversed(frontier.points)
    ]
    grid = tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True, stralign="right")
    return f"What budgets cost ({frontier.costs} costs; a step's forward and backward)\n{grid}"


# What bounds an operator, or a step.
COMPUTE, BANDWIDTH, LAUNCHES, OPTIMIZER_PART = "compute", "memory bandwidth", "launches", "optimizer"
COPIES = "copies to the host"


@dataclass(frozen=True)
class Technique:
    """A way to train a model.

    Attributes:
        name: `level 1`, as the advice shows it.
        flags: that ask for it, without that of the loss; empty where it is not one of the package.
        chunks_loss: the loss is computed without its logits.
        is_own: one of the package's; else it is shown to compare with.
        accumulates: an optimizer step may have several micro-batches.
    """

    name: str
    flags: tuple[str, ...] = ()
    chunks_loss: bool = False
    is_own: bool = True
    accumulates: bool = True


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

    def total(self, accumulation: int) -> float:
        """Seconds of an optimizer step of several micro-batches."""
        return sum(self.by_bound(accumulation).values())

    def by_bound(self, accumulation: int) -> dict[str, float]:
        """Seconds of an optimizer step of several micro-batches, by what bounds them."""
        micro_batches = {bound: seconds * accumulation for bound, seconds in self.seconds.items()}
        return {**micro_batches, OPTIMIZER_PART: self.optimizer + self.accumulating * (accumulation - 1)}


@dataclass(frozen=True)
class EagerSettings:
    """Settings of the plain PyTorch baseline.

    Attributes:
        checkpoints: every nth layer is checkpointed; 0: none.
        keeps_outputs: the loop holds the model's outputs during the backward, the key-value cache among them; Trainer
            drops them.
    """

    checkpoints: int = 0
    keeps_outputs: bool = False


@dataclass(frozen=True)
class Way:
    """A way to train a model, and what a step of it takes.

    Attributes:
        plan: the way, with its flags.
        peak: bytes of the blocks of torch's allocator on CUDA, elsewhere those that tensors ask for.
        reserved: bytes that the allocator takes of the device; None where it is not known.
        seconds: of the forward and backward of a micro-batch; None where they are not known.
        timeline: the step, operator by operator; None where nobody has it.
        note: why there are no figures; empty where there are.
    """

    plan: Technique
    peak: int = 0
    reserved: int | None = None
    seconds: float | None = None
    timeline: StepTimeline | None = field(default=None, repr=False)
    note: str = ""


@dataclass(frozen=True)
class SimulatedStep:
    """A step that has run on tensors without data.

    Attributes:
        given: bytes that are there at its first operator.
        peak: bytes of the blocks of torch's allocator on CUDA, elsewhere those that tensors ask for.
        reserved: bytes that the allocator takes of the device; None where it is not known.
        phases: the most bytes that tensors ask for in each of `forward`, `backward`, `optimizer`, in modules that a
            step calls without gradients (`no-grad`), and in phases that it names, in the order in which they begin.
        timeline: operator by operator.
    """

    given: int
    peak: int
    reserved: int | None
    phases: Mapping[str, int]
    timeline: StepTimeline = field(repr=False)


class Simulator(Protocol):
    """Runs steps on tensors without data, as plain PyTorch on a device."""

    @property
    def memory(self) -> "Capacity":
        """Memory of the device."""

    @property
    def shares_host(self) -> bool:
        """True where the device's memory is the host's."""

    @property
    def constant(self) -> int:
        """Bytes that are always held beside the tensors of steps: of libraries, of this process."""

    def copy(self, value: Any) -> Any:
        """A deep copy of anything whose tensors have no data. Raises MemOptError."""

    def replace(self, holders: "Sequence[torch.nn.Module | torch.optim.Optimizer]") -> None:
        """Put tensors without data in the place of those of modules and optimizers, until the simulator is left."""

    def phase(self, name: str) -> "AbstractContextManager[None]":
        """Within it a step that runs is in a phase of this name."""

    def run(
        self, call: Callable[[], Any], held: object, finds_variables: bool = True, reads_floats: bool = False
    ) -> SimulatedStep:
        """Call twice; the second is counted.

        Args:
            call: a step, whose tensors are this simulator's.
            held: what has the tensors that are there before it, and the modules that name its operators.
            finds_variables: call once more, to find the variables that hold memory at the peak.
            reads_floats: a floating-point number that is read is 1, as for logs.

        Raises:
            MemOptError: one line: a value that is read, or what the step raises.
        """


class StepPredictor(Protocol):
    """Predicts steps of one model.

    Attributes:
        model: name of its class.
        weights: their types, as `bfloat16 and float32`.
        device: `H100`, `cpu`.
        costs: where seconds are from, as `roofline H100`.
        budget: bytes that the peak of a step must not pass.
        tokens: of a row; 0 where rows have no tokens.
        remarks: lines about all plans.
    """

    @property
    def model(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def costs(self) -> str: ...
    @property
    def budget(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def remarks(self) -> Sequence[str]: ...
    @property
    def plans(self) -> tuple[Technique, ...]: ...

    @property
    def optimizers(self) -> "tuple[OptimizerMemory, ...]":
        """The memory of the optimizers that are known, that of the step first."""

    def with_optimizer(self, optimizer: "OptimizerMemory") -> "StepPredictor":
        """The same steps with the memory of another optimizer; seconds stay those of the one before."""

    def fits(self, plan: Technique, rows: int, accumulates: bool) -> bool:
        """True where the peak of a step is within the budget; `accumulates`: of one of several micro-batches."""

    def step(self, plan: Technique, rows: int, accumulates: bool) -> PredictedStep:
        """A step that fits; arguments as in `fits`."""

    def lowest(self, plan: Technique, accumulates: bool) -> int:
        """The peak with a micro-batch of one row, in bytes."""
