"""The options that every engine reads, the plan that they ask for, and the run."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from optimum_memopt.logs import LOG_LEVELS, get_logger, set_log_level
from optimum_memopt.memory.optimizers import Optimizer
from optimum_memopt.option_values import Numbers, flag
from optimum_memopt.plans.grammar import ConfigSource, PlanConfig, to_text
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.sizes import Budget

if TYPE_CHECKING:
    import torch

AUTO = "auto"
ON_OOM = EXPLAIN, REPLAN = ("explain", "replan")
_LEVELS = Numbers(0, 2, "0 (the config), 1 (recompute in each layer) and 2 (also with compromised saving)")


@dataclass(frozen=True)
class LargestBatch:
    """Sizes of the largest batch of a run.

    Attributes:
        length: tokens of the longest row.
        lengths: tokens of the longest row of each batch of an epoch, for one order that the run's sampler may draw;
            empty where they are not known.
        tokens: of the longest rows, as many as a batch has.
        flattened: how many rows are one after another in its only one (padding-free batches); 0: it is not so.
    """

    rows: int
    length: int
    lengths: tuple[int, ...] = field(default=(), compare=False, repr=False)
    tokens: int = field(default=0, compare=False, repr=False)
    flattened: int = 0

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"

    @property
    def has_padding(self) -> bool:
        """True where batches of the run are known to have it."""
        return self.rows > 1 and not self.flattened and len(set(self.lengths)) > 1


@dataclass(frozen=True)
class LossStep:
    """A step's loss that is computed outside of the model's forward, and may be computed on tensors without data.

    Attributes:
        name: of what computes it, `Distiller.compute_loss`.
        unknown: why it may not be computed again; empty where it may.
        inputs: a batch.
        arguments: what `compute` is given behind it, by position and by keyword, whatever the batch.
        compute: returns the loss of such inputs; calls the model's forward.
        modules: whose tensors it uses or changes, the model among them.
        prepared: a context within which it may be computed, and behind which everything is as it was.
    """

    name: str
    unknown: str = ""
    inputs: Any = field(default=None, repr=False)
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}), repr=False)
    compute: Callable[..., "torch.Tensor"] | None = field(default=None, repr=False)
    modules: Callable[[], "Sequence[torch.nn.Module]"] = field(default=tuple, repr=False)
    prepared: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, repr=False)


class HeldUntil(IntEnum):
    """The moment when a training loop drops the outputs of a forward."""

    # `loss = model(**batch).loss`, as Trainer does.
    BACKWARD = 0
    # `out = model(**batch)` in a function that ends with the step.
    END_OF_STEP = 1
    # The same in a loop: the variable keeps them until the next forward has returned.
    NEXT_FORWARD = 2


@dataclass(frozen=True)
class HeldOutputs:
    """Outputs of a training forward beside the loss that the training loop holds.

    Attributes:
        copies: they are copies, as accelerate's in float32, so many times as large as the forward's results; 0: they
            are the results themselves.
        more: bytes of outputs of earlier forwards, held throughout the step.
        loss: the peak of the loop's own allocations between a forward and its backward (its loss, metrics), in
            multiples of the outputs' bytes.
        left: the part of these that is held in the backward, for as long as the outputs; in the same unit.
    """

    until: HeldUntil = HeldUntil.BACKWARD
    copies: float = 0.0
    more: int = 0
    loss: float = 0.0
    left: float = 0.0


NOTHING_HELD = HeldOutputs()
# Size of accelerate's copies in float32 to outputs under autocast, of 16 bits.
IN_FLOAT32 = 2.0


@dataclass(frozen=True)
class OtherForwards:
    """The forwards that come before one backward with the largest of them: what they save is held, too.

    Both numbers are multiples of what the largest one saves.

    Attributes:
        earlier: held while the last forward runs.
        between: held by others while an earlier forward's backward runs, when gradients of the later ones are there.
    """

    earlier: float = 0.0
    between: float = 0.0


# A forward before each backward.
ALONE = OtherForwards()


@dataclass(frozen=True)
class Run:
    """A training run beside its model.

    Attributes:
        optimizer: one that is planned where nothing is run; None before there is one.
        gradient_accumulation: gradients of several micro-batches add up.
        largest_batch: reads it from the training data; None where that cannot tell.
        rows: of a micro-batch as the data loader counts them, of which a Trainer may make several of the model's each
            (DPO's pairs); 0: not known.
        micro_batches: of an optimizer step; all of them are on the device while it runs, as Trainer fetches them; 0:
            the one that runs is alone.
        loss: asked in a training forward; None where the loss is the forward's own.
        has_trainer: False: a training loop, which may compute its loss from the outputs.
        releases_gradients: the optimizer steps in the backward, layer by layer, and frees the gradients.
        held_outputs: as far as forwards of the run have shown; until then as it is assumed.
        others: before one backward, as far as steps have shown.
        earlier_forwards: bytes that they hold now: what they save for a backward to come, and outputs.
    """

    optimizer: Optimizer | None = None
    gradient_accumulation: bool = False
    largest_batch: Callable[[], LargestBatch | None] = lambda: None
    rows: int = 0
    micro_batches: int = 0
    loss: Callable[[], LossStep | None] = lambda: None
    has_trainer: bool = True
    releases_gradients: bool = False
    held_outputs: HeldOutputs = NOTHING_HELD
    others: OtherForwards = ALONE
    earlier_forwards: int = 0

    @property
    def batches_held(self) -> int:
        """The number of micro-batches on the device while one runs."""
        return max(1, self.micro_batches)


@dataclass(frozen=True)
class Selection:
    """The plan that was asked for: a config, a level from 1 on, a budget, or a plan file.

    Attributes:
        strict: ids that do not exist are errors instead of remarks.
        compress: `fp8`, in which all is saved that the config or level saves, and what a budget's solver picks; None:
            nothing is compressed by itself.
    """

    config: PlanConfig | None = None
    level: int = 0
    strict: bool = True
    budget: Budget | None = None
    plan: PlanFile | None = None
    compress: str | None = None

    @property
    def name(self) -> str:
        """`level 1`, `level 1 in fp8`; empty where nothing was asked for."""
        if self.compress is not None:
            return f"{replace(self, compress=None).name or 'activations'} in {self.compress}"
        if self.plan is not None:
            return "the plan file"
        if self.budget is not None:
            return f"the plan of budget {self.budget.text}"
        if self.level:
            return f"level {self.level}"
        return "" if self.config is None else f"config {self.config}"


@dataclass
class EngineOptions:
    """The options that every engine reads. An engine's own flags are a subclass, `MemOptOptions` is all of them.

    From Python `memory_opt_config` is also a list of `cluster_id:strategy:count`, a dict of cluster id to strategy
    (`{"Gelu+": 1}`, all occurrences) or to `strategy:count` (`{"Gelu+": "1:4"}`), the `Path` of a file, or a
    `PlanConfig`; `MemOptOptions.check` makes the flag's text of it.
    """

    memory_opt_engine: str = AUTO
    memory_opt_config: ConfigSource | None = flag(
        None,
        "Plans to turn on, cluster_id:strategy:count separated by commas, or a JSON file with a list of such strings. "
        "Strategy: 0 none, 1 recompute, 2 recompute with compromised saving, 3 offload to the host, 4 compress to "
        "fp8, inexact (3 and 4: compile engine). "
        "Count: -1 all, 0 off, N the first N (compile engine). Example: Gelu+:1:-1. The plan table lists the cluster "
        "ids of your model.",
    )
    memory_opt_level: Annotated[int, _LEVELS] = flag(
        0,
        "0: the plans of --memory_opt_config. 1: all recomputable plans inside each transformer layer, less those "
        "that would raise the peak. 2: also those with compromised saving. Not together with a config.",
    )
    memory_opt_strict: bool = flag(
        True, "Stop at a cluster id that the model does not have; false: warn and go on without it."
    )
    memory_opt_log_level: str = flag(
        "info",
        "info: the plan table, on rank 0. devinfo: also each node as the engine sees it, on all ranks, and a line for "
        "each memory phase. verbose: also the engine's own log.",
        choices=tuple(LOG_LEVELS),
    )
    memory_opt_report: os.PathLike | str | None = flag(
        None,
        "When training ends, however it ends, write a page about its memory to this HTML file: the step operator by "
        "operator, predicted beside measured phases, the plan table. Measures memory phases as --log_memory_phases "
        "does. Needs the extra report.",
    )
    memory_opt_on_oom: str = flag(
        EXPLAIN,
        "When a training step runs out of memory. explain: log what was held and what would have fit, write "
        "memory_report.json into --output_dir, and stop with the same error. replan: plan for what there is, run the "
        "same step again and go on, at most three times; compile engine, not with DeepSpeed or FSDP.",
        choices=ON_OOM,
    )

    @property
    def plan_config(self) -> PlanConfig | None:
        """`memory_opt_config`, read; a file is read the first time. Raises ConfigError."""
        if self.memory_opt_config is None:
            return None
        text = to_text(self.memory_opt_config)
        return self._read(f"config {text}", lambda: PlanConfig.load(text))

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        # No field, so that it is neither a flag nor serialised; shallow copies share it.
        files: dict[str, Any] = vars(self).setdefault("_files", {})
        if name not in files:
            files[name] = read()
        return files[name]

    def check_values(self) -> None:
        """Refuse wrong values and options that do not go together. Raises MemOptError."""
        raise NotImplementedError


Options = TypeVar("Options", bound=EngineOptions)


@dataclass(frozen=True)
class Resolved(Generic[Options]):
    """The engine that trains, and its plan: decided once, the same for everyone who asks later.

    Attributes:
        reason: why this one.
        options: those in force: the user's, as the engine's variables in the environment change them.
        remarks: a line for each variable of the environment that counts; not logged yet.
        given: flags of this engine alone that the user gave.
        then: the engine that takes over if this one turns out unable to train the model; None: nothing.
    """

    engine: str
    reason: str
    options: Options
    selection: Selection
    remarks: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    then: "Resolved[Options] | None" = None

    def log(self) -> None:
        """Log the remarks, at the log level that is in force from now on."""
        set_log_level(self.options.memory_opt_log_level)
        for remark in self.remarks:
            get_logger().warning(remark)
