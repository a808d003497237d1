"""The options that every engine reads, the plan that they request, and the training run."""

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
        lengths: tokens of the longest row of each batch in an epoch, for one order that the run's sampler may draw;
            empty if unknown.
        tokens: total tokens of the dataset's longest rows, as many rows as a batch has.
        flattened: number of rows concatenated into the batch's single row (padding-free batches); 0: not concatenated.
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
        """True if batches of the run are known to have padding."""
        return self.rows > 1 and not self.flattened and len(set(self.lengths)) > 1


@dataclass(frozen=True)
class LossStep:
    """A step's loss that is computed outside of the model's forward, and can be computed on tensors without data.

    Attributes:
        name: name of the function that computes it, such as `Distiller.compute_loss`.
        unknown: why it cannot be computed again; empty if it can.
        inputs: a batch.
        arguments: further positional and keyword arguments of `compute`, the same for every batch.
        compute: returns the loss of a batch; calls the model's forward.
        modules: returns the modules whose tensors it uses or changes, including the model.
        prepared: returns a context to compute it in, which restores all state on exit.
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
    """Outputs of a training forward, other than the loss, that the training loop holds.

    Attributes:
        copies: size of the held copies in multiples of the forward's results, as for accelerate's in float32; 0: the
            results themselves are held.
        more: bytes of outputs of earlier forwards, held throughout the step.
        loss: the peak of the loop's own allocations between a forward and its backward (its loss, metrics), in
            multiples of the outputs' bytes.
        left: the part of these allocations that is held in the backward, for as long as the outputs; in the same unit.
    """

    until: HeldUntil = HeldUntil.BACKWARD
    copies: float = 0.0
    more: int = 0
    loss: float = 0.0
    left: float = 0.0


NOTHING_HELD = HeldOutputs()
# Size of accelerate's float32 copies in multiples of the 16-bit outputs under autocast.
IN_FLOAT32 = 2.0


@dataclass(frozen=True)
class OtherForwards:
    """Saved activations of the other forwards in steps with several forwards before one backward.

    Both numbers are multiples of the bytes that the largest of these forwards saves.

    Attributes:
        earlier: held while the last forward runs.
        between: held by the other forwards during an earlier forward's backward, when the later ones' gradients exist.
    """

    earlier: float = 0.0
    between: float = 0.0


# One forward before each backward.
ALONE = OtherForwards()


@dataclass(frozen=True)
class Run:
    """A training run without its model.

    Attributes:
        optimizer: the optimizer, or a planned one in predictions; None before it is created.
        gradient_accumulation: whether gradients of several micro-batches are accumulated.
        largest_batch: returns the largest batch of the training data; None if unknown.
        rows: rows of a micro-batch as the data loader counts them; a Trainer may give the model several rows for each
            (DPO's pairs). 0: unknown.
        micro_batches: micro-batches of an optimizer step, which Trainer holds on the device together; 0: only the
            current one is on the device.
        loss: called in a training forward; returns the step's loss, None if the forward computes it.
        has_trainer: False for the user's own training loop, which may compute its loss from the outputs.
        releases_gradients: whether the optimizer steps in the backward, layer by layer, and frees the gradients.
        held_outputs: outputs that the training loop holds; assumed until the run's forwards have shown it.
        others: other forwards before one backward, as seen in steps so far.
        earlier_forwards: bytes that earlier forwards hold now: activations saved for pending backwards, and outputs.
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
        """Returns the number of micro-batches on the device while one runs."""
        return max(1, self.micro_batches)


@dataclass(frozen=True)
class Selection:
    """The requested plan: a config, level 1 or 2, a budget, or a plan file.

    Attributes:
        strict: whether unknown cluster ids are errors instead of remarks.
        compress: `fp8`: compress all activations that the config or level saves, or those that a budget's solver
            picks; None: only those that the config names.
    """

    config: PlanConfig | None = None
    level: int = 0
    strict: bool = True
    budget: Budget | None = None
    plan: PlanFile | None = None
    compress: str | None = None

    @property
    def name(self) -> str:
        """Returns `level 1` or `level 1 in fp8`; empty if no plan was requested."""
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
    """The options that every engine reads. A subclass per engine adds its own flags; `MemOptOptions` has all of them.

    From Python `memory_opt_config` is also a list of `cluster_id:strategy:count`, a dict of cluster id to strategy
    (`{"Gelu+": 1}`, all occurrences) or to `strategy:count` (`{"Gelu+": "1:4"}`), the `Path` of a file, or a
    `PlanConfig`; `MemOptOptions.check` converts it to the flag's text.
    """

    memory_opt_engine: str = AUTO
    memory_opt_config: ConfigSource | None = flag(
        None,
        "Plans to enable: cluster_id:strategy:count separated by commas, or a JSON file with a list of such strings. "
        "Strategy: 0 none, 1 recompute, 2 recompute with compromised saving, 3 offload to the host, 4 compress to "
        "fp8, inexact (3 and 4: compile engine). "
        "Count: -1 all, 0 off, N the first N (compile engine). Example: Gelu+:1:-1. The plan table lists the cluster "
        "ids of your model.",
    )
    memory_opt_level: Annotated[int, _LEVELS] = flag(
        0,
        "0: the plans of --memory_opt_config. 1: all recomputable plans inside each transformer layer, except those "
        "that would raise the peak. 2: also those with compromised saving. Not together with a config.",
    )
    memory_opt_strict: bool = flag(
        True, "Stop at a cluster id that the model does not have; false: warn and ignore the id."
    )
    memory_opt_log_level: str = flag(
        "info",
        "warning: no tables. info: the plan table, on rank 0. devinfo: also each node as the engine sees it, on all "
        "ranks, and a line for each memory phase. verbose: also the engine's own log.",
        choices=tuple(LOG_LEVELS),
    )
    memory_opt_report: os.PathLike | str | None = flag(
        None,
        "When training ends, even with an error, write a page about its memory to this HTML file: memory of a step by "
        "operator, predicted and measured phases, and the plan table. Measures memory phases like "
        "--log_memory_phases. Needs the extra report.",
    )
    memory_opt_on_oom: str = flag(
        EXPLAIN,
        "What to do when a training step runs out of memory. explain: log what was held and what would have fit, "
        "write memory_report.json into --output_dir, and stop with the same error. replan: plan for the available "
        "memory, rerun the step and continue, at most three times; compile engine, not with DeepSpeed or FSDP.",
        choices=ON_OOM,
    )

    @property
    def plan_config(self) -> PlanConfig | None:
        """Returns the parsed `memory_opt_config`; a file is read only once. Raises ConfigError."""
        if self.memory_opt_config is None:
            return None
        text = to_text(self.memory_opt_config)
        return self._read(f"config {text}", lambda: PlanConfig.load(text))

    def _read(self, name: str, read: Callable[[], Any]) -> Any:
        # Not a dataclass field, so that it is neither a flag nor serialised; shallow copies share it.
        files: dict[str, Any] = vars(self).setdefault("_files", {})
        if name not in files:
            files[name] = read()
        return files[name]

    def check_values(self) -> None:
        """Refuse invalid values and conflicting options. Raises MemOptError."""
        raise NotImplementedError


Options = TypeVar("Options", bound=EngineOptions)


@dataclass(frozen=True)
class Resolved(Generic[Options]):
    """The selected engine and its plan, decided once for all callers.

    Attributes:
        reason: why this engine was selected.
        options: the options in force: the user's, with overrides from the engine's environment variables.
        remarks: a line for each environment variable in effect; not logged yet.
        given: flags that only this engine reads, as the user gave them.
        then: the engine that takes over if this one cannot train the model; None: no fallback.
    """

    engine: str
    reason: str
    options: Options
    selection: Selection
    remarks: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    then: "Resolved[Options] | None" = None

    def log(self) -> None:
        """Set the log level of the options, and log the remarks."""
        set_log_level(self.options.memory_opt_log_level)
        for remark in self.remarks:
            get_logger().warning(remark)
