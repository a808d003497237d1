"""Predictions of training steps, and the workloads that are predicted. Pure."""

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tabulate import tabulate

from optimum_memopt.engines.api.layer_paths import equal_layers
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import MIB, gib_text

if TYPE_CHECKING:
    import torch

    from optimum_memopt.memory.capacity import Capacity
    from optimum_memopt.memory.optimizers import OptimizerMemory


# From the bottom of a chart to its top: memory that is always held comes first.
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
# Boundaries of a step's phases, as `--log_memory_phases` names them.
PRE_FORWARD, POST_FORWARD, PRE_BACKWARD, POST_BACKWARD, POST_OPTIMIZER_STEP = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "post_backward",
    "post_optimizer_step",
)


# Maximum number of tensor groups shown per category, and bytes of the smallest group shown.
_GROUPS, _SHOWN = 3, 2**20


@dataclass(frozen=True)
class Group:
    """Tensors of one kind that are held at the same time.

    Attributes:
        category: one of `CATEGORIES`.
        name: cluster id such as `Gelu+` of saved activations that have one, else an operator; empty for a whole
            category.
        count: number of tensors; 0 if they were not counted.
        layers: paths of the transformer layers that compute them, all in one list.
        module: path of the module that computes them, relative to its layer, or to the model outside of layers.
    """

    category: str
    name: str
    count: int
    bytes: int
    layers: tuple[str, ...] = ()
    module: str = ""

    @property
    def where(self) -> str:
        """Returns the module's path, `model.layers.3.mlp`; for several layers `model.layers.*.mlp x 16`."""
        layer = self.layers[0] if len(self.layers) == 1 else "".join(map(equal_layers, self.layers[:1]))
        path = ".".join(filter(None, (layer, self.module)))
        return f"{path} x {len(self.layers)}" if len(self.layers) > 1 else path


@dataclass(frozen=True)
class Phase:
    """Memory at the end of a phase of the step, in bytes.

    Attributes:
        name: name of the boundary, such as `post_forward`.
        peak: the peak since the previous boundary.
    """

    name: str
    held: int
    peak: int


@dataclass(frozen=True)
class StepTimeline:
    """A predicted training step; tuples have one entry per operator, in execution order.

    Attributes:
        operators: names of the operators of the forward and the backward; the last entry is the optimizer's step.
        layers: path of each operator's transformer layer, empty outside of layers.
        held: bytes by category while each operator runs; has every category of `CATEGORIES`.
        backward_at: index of the backward's first operator.
        alive: groups of tensors held at the peak, largest first.
        phases: memory at the phase boundaries.
        sizes: sizes of the batch, by the plan table's names.
        counts: what the entries are: `operators`, or `allocations` of a compiled program.
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
        """Returns the bytes held while each operator runs."""
        return tuple(map(sum, zip(*self.held.values(), strict=True)))

    @property
    def peak(self) -> int:
        """Returns the predicted peak of the step, in bytes."""
        return max(self.total)

    @property
    def peak_at(self) -> int:
        return self.total.index(self.peak)

    @property
    def optimizer_at(self) -> int:
        return len(self.operators) - 1

    @property
    def peak_phase(self) -> str:
        """Returns the phase of the peak: `forward`, `backward` or `optimizer`."""
        if self.peak_at == self.optimizer_at:
            return "optimizer"
        return "forward" if self.peak_at < self.backward_at else "backward"

    @property
    def peak_place(self) -> str:
        """Returns the place of the peak, such as `in the backward, at mm of model.layers.3`."""
        layer = self.layers[self.peak_at]
        return f"in the {self.peak_phase}, at {self.operators[self.peak_at]}{f' of {layer}' if layer else ''}"

    def held_text(self, name: str) -> str:
        """Returns a table of the largest tensor groups at the peak; `name` is the name of the step in its title."""
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
        """Returns the tensor groups at the peak, largest first; their bytes add up to `peak`.

        Args:
            peak: on CUDA the peak of the allocator's blocks, elsewhere `self.peak`.
        """
        rest = Group(OTHER, "allocator overhead (blocks beyond their tensors)", 0, peak - self.peak)
        return tuple(sorted((*self.alive, *([rest] if rest.bytes else [])), key=lambda group: -group.bytes))

    def peak_text(self, peak: int) -> str:
        """Returns a table of `at_peak`."""
        rows = [
            (each.category, each.name, each.where, each.count or "", f"{each.bytes:,}", gib_text(each.bytes))
            for each in self.at_peak(peak)
        ]
        rows.append(("predicted peak", "", "", "", f"{peak:,}", gib_text(peak)))
        headers = ("category", "row or operator", "module", "tensors", "bytes", "size")
        align = ("left", "left", "left", "right", "right", "right")
        grid = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)
        return f"Tensors at the predicted peak, {self.peak_place}:\n{grid}"


class Workload(Protocol):
    """A model and a batch that are planned for before they are built.

    Attributes:
        batch_size: rows of a batch.
        tokens: tokens of a row; 0: taken from the batch, if it has tokens.
        suggestion: how to get figures for a model that cannot be traced; empty if there is no way.
        values: inputs whose values are known, on the CPU. Models branch on the values of masks; an unknown mask is
            assumed to have padding.
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
        """Returns a model in training mode and its forward's keyword arguments, as fake tensors. Raises
        MemOptError."""


@dataclass(frozen=True)
class ModelOfRun:
    """A model that is about to train, on its training device; it is not modified.

    Attributes:
        make_batch: returns the forward's arguments for a batch of that many rows.
        tokens: tokens of the longest row; 0: taken from the batches.
        reads_logits: whether outputs other than the loss are read.
        optimizer: the user's own; None: Trainer makes that of the step's settings.
    """

    model: "torch.nn.Module"
    make_batch: Callable[[int], Mapping[str, Any]]
    tokens: int
    reads_logits: bool
    optimizer: "torch.optim.Optimizer | None" = None


@dataclass(frozen=True)
class PlannedDevice:
    """The device that a plan is made for.

    Attributes:
        lacks: half-precision dtypes that it does not compute in, such as `bfloat16`.
    """

    name: str
    memory: "Capacity"
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurvePoint:
    """The plan of one budget; sizes are bytes.

    Attributes:
        extra_seconds: time of recompute.
        seconds: time of forward and backward without recompute.
    """

    budget: int
    peak: int
    extra_seconds: float
    seconds: float

    @property
    def extra_time(self) -> float:
        """Returns `extra_seconds` as a share of `seconds`."""
        return self.extra_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Frontier:
    """The time-memory frontier: the extra time of each budget.

    Attributes:
        points: from the smallest budget to the largest.
        costs: source of the times, such as `roofline H100`.
        chosen: the plan in force; None if its time is unknown.
    """

    points: tuple[CurvePoint, ...]
    costs: str
    chosen: CurvePoint | None = None


@dataclass(frozen=True)
class BatchPoint:
    """A step with one batch size.

    Attributes:
        peak: bytes that tensors request.
        activations: the part of `peak` held by a forward and its backward, including the gradients it returns.
        saved: the part of `activations` that is saved for backward.
        allocated: bytes of the allocator's blocks on CUDA; None if unknown.
        reserved: bytes that the allocator reserves on the device; None if unknown.
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
        peak_mib: peak of the bytes that tensors request, in MiB.
        attention: transformers' name of the assumed attention implementation.
        assumes: the assumptions of the prediction, and how exact it is.
        frontier: the time-memory frontier with the plan; None if not requested.
        batches: steps with other batch sizes; empty if not requested.
        ways: steps of the engine without a plan, at level 1 and with the selected plan; empty if not requested.
        allocated: bytes of the allocator's blocks on CUDA; None if unknown.
        reserved: bytes that the allocator reserves on the device; None if unknown.
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
        """Returns the bytes that a budget bounds: those that tensors request, or the allocator's blocks if larger."""
        return max(round(self.peak_mib * MIB), self.allocated or 0)

    def to_text(self) -> str:
        """Returns the table of plans or batch sizes, the budget curve, and the assumptions of the prediction."""
        curve = f"\n\n{_curve_text(self.frontier)}\n" if self.frontier else ""
        table = self.table.to_text()
        if self.batches:
            table = f"{self.table.header[0]}\n{_batches_text(self.batches, self.capacity)}"
        elif self.capacity is not None:
            table = f"{table}\nOn {self.device} it {self.capacity.verdict(self.peak)}"
        return f"{table}{curve}\n{self.assumes}"

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict for JSON, without the plan, which has its own file, and the timeline, which is a chart."""
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
    """Returns the table cell that says whether a step with this peak fits into a device's memory; None: unknown."""
    verdict = "-" if peak is None else memory.verdict(peak).partition(":")[0]
    return {f"in {gib_text(memory.available)}": verdict}


def _curve_text(frontier: Frontier) -> str:
    rows = [
        {"budget": gib_text(point.budget), "predicted peak": gib_text(point.peak), "time": f"{point.extra_time:+.1%}"}
        for point in reversed(frontier.points)
    ]
    grid = tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True, stralign="right")
    return f"Cost of budgets, in time of forward and backward ({frontier.costs} costs)\n{grid}"


# Resources that bound the time of an operator or a step.
COMPUTE, BANDWIDTH, LAUNCHES, OPTIMIZER_PART = "compute", "memory bandwidth", "launches", "optimizer"
COPIES = "copies to the host"


@dataclass(frozen=True)
class Technique:
    """A way to train a model.

    Attributes:
        name: its name in the advice, such as `level 1`.
        flags: flags that select it, without the loss flag; empty if it is not part of this package.
        chunks_loss: whether the loss is computed in chunks, without full logits.
        is_own: whether it is part of this package; if not, it is shown for comparison.
        accumulates: whether an optimizer step may have several micro-batches.
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
        peak: peak of the step, in bytes.
        seconds: seconds of one micro-batch's forward and backward, by the resource that bounds their operators.
        accumulating: seconds to add one micro-batch's gradients to the accumulated ones.
        optimizer: seconds to clip the gradients and run the optimizer's step.
        recomputing: the part of `seconds` spent on recompute.
        host_bytes: bytes of offloaded activations on the host.
    """

    peak: int
    seconds: Mapping[str, float]
    accumulating: float
    optimizer: float
    recomputing: float = 0.0
    host_bytes: int = 0

    def total(self, accumulation: int) -> float:
        """Returns the seconds of an optimizer step with `accumulation` micro-batches."""
        return sum(self.by_bound(accumulation).values())

    def by_bound(self, accumulation: int) -> dict[str, float]:
        """Returns the seconds of an optimizer step with `accumulation` micro-batches, by bounding resource."""
        micro_batches = {bound: seconds * accumulation for bound, seconds in self.seconds.items()}
        return {**micro_batches, OPTIMIZER_PART: self.optimizer + self.accumulating * (accumulation - 1)}


@dataclass(frozen=True)
class EagerSettings:
    """Settings of the plain PyTorch baseline.

    Attributes:
        checkpoints: every nth layer is checkpointed; 0: none.
        keeps_outputs: whether the loop holds the model's outputs, including the key-value cache, during the backward;
            Trainer drops them.
    """

    checkpoints: int = 0
    keeps_outputs: bool = False


@dataclass(frozen=True)
class Way:
    """A way to train a model, with the memory and time of a step.

    Attributes:
        plan: the way, with its flags.
        peak: on CUDA bytes of the allocator's blocks, elsewhere bytes that tensors request.
        reserved: bytes that the allocator reserves on the device; None if unknown.
        seconds: seconds of an optimizer step with all its micro-batches; None if unknown.
        timeline: the step, operator by operator; None if unavailable.
        note: why there are no figures; empty if there are.
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
        given: bytes held at its first operator.
        peak: on CUDA bytes of the allocator's blocks, elsewhere bytes that tensors request.
        reserved: bytes that the allocator reserves on the device; None if unknown.
        phases: peak of the bytes that tensors request in `forward`, `backward`, `optimizer`, in modules called without
            gradients (`no-grad`), and in phases that the step names, in the order in which they begin.
        timeline: the step, operator by operator.
    """

    given: int
    peak: int
    reserved: int | None
    phases: Mapping[str, int]
    timeline: StepTimeline = field(repr=False)


class StepPredictor(Protocol):
    """Predicts steps of one model.

    Attributes:
        model: name of the model's class.
        weights: dtypes of the weights, such as `bfloat16 and float32`.
        device: device name, such as `H100` or `cpu`.
        costs: source of the seconds, such as `roofline H100`.
        budget: bytes that the peak of a step must not exceed.
        tokens: tokens of a row; 0 if rows have no tokens.
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
        """Returns the memory of all known optimizers, the step's own first."""

    def with_optimizer(self, optimizer: "OptimizerMemory") -> "StepPredictor":
        """Returns a predictor with another optimizer's memory; seconds remain those of the original optimizer."""

    def fits(self, plan: Technique, rows: int, accumulation: int) -> bool:
        """True if the peak of a step is within the budget.

        Args:
            rows: rows of a micro-batch.
            accumulation: micro-batches of an optimizer step.
        """

    def step(self, plan: Technique, rows: int, accumulation: int) -> PredictedStep:
        """Returns the prediction of a step that fits; arguments as in `fits`."""

    def lowest(self, plan: Technique, accumulation: int) -> int:
        """Returns the peak with a micro-batch of one row, in bytes."""
