"""The phases of a run beside its training step, and the flags with which they fit. Pure.

The memory that Trainer collects during evaluation follows transformers 5.23 (`EvalLoopContainer`, `nested_concat`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tabulate import tabulate

from optimum_memopt.compat.transformers import checkpointing_flag
from optimum_memopt.engines.api.predictions import StepTimeline
from optimum_memopt.sizes import gib_text


@dataclass(frozen=True)
class RunPhase:
    """A phase of a run.

    Attributes:
        name: name of the phase, such as `evaluation`.
        peak: peak on the device, in bytes.
        host: additional bytes on the host; 0: almost none.
        note: what is held, in a few words.
        least: lower bound of the bytes on the device, whatever the data; 0: unknown.
    """

    name: str
    peak: int
    host: int = 0
    note: str = ""
    least: int = 0


@dataclass(frozen=True)
class Evaluation:
    """The memory of an evaluation by Trainer, in bytes.

    Attributes:
        given: bytes held before it: parameters, optimizer states.
        forward: additional bytes of a batch's forward, including its results.
        rows: rows of a batch.
        total_rows: rows of the data.
        logits: bytes of logits collected per batch, after `preprocess_logits_for_metrics`; 0: none.
        labels: bytes collected per batch of labels, and of inputs that metrics request.
        accumulation: number of batches collected on the device before they move to the host; None: all.
        concatenates: whether batches are concatenated into one tensor (`--eval_do_concat_batches`).
        is_on_host: whether the device's memory is the host's.
    """

    given: int
    forward: int
    rows: int
    total_rows: int
    logits: int = 0
    labels: int = 0
    accumulation: int | None = None
    concatenates: bool = True
    is_on_host: bool = False

    @property
    def batches(self) -> float:
        """Returns the number of batches collected on the device at the same time."""
        total = self.total_rows / self.rows
        return total if self.accumulation is None else min(total, self.accumulation)

    @property
    def collected(self) -> int:
        """Returns the peak of the collected bytes on the device, at the end: the earlier batches, the last one, and
        the concatenation of both."""
        count, per_batch = self.batches, self.logits + self.labels
        if not self.concatenates or count <= 1:
            return round(count * per_batch)
        with_logits = 2 * count * self.logits + count * self.labels
        with_labels = (count + 1) * self.logits + 2 * count * self.labels
        return round(max(with_logits, with_labels))

    @property
    def peak(self) -> int:
        """Returns the peak in bytes, in the last forward or when the last batch is collected."""
        on_device = self._on_device
        if not self.is_on_host or not self._is_in_parts:
            return self.given + on_device
        return self.given + max(self.host, self._all + on_device)

    @property
    def least(self) -> int:
        """Returns the bytes held at the end, however rows are grouped into batches."""
        collected = self.batches * (self.logits + self.labels) if self.concatenates else 0
        return self.given + round(collected)

    @property
    def _on_device(self) -> int:
        per_batch = self.logits + self.labels
        before = max(0.0, self.batches - 1) * per_batch
        if self.concatenates and self.batches > _COPIED_FROM:
            # The loop's variables keep the previous batch's results until the next results exist.
            before += per_batch
        return max(round(before) + self.forward, self.collected)

    @property
    def _is_in_parts(self) -> bool:
        """True if collected results move to the host more than once."""
        return self.accumulation is not None and self.accumulation < self.total_rows / self.rows

    @property
    def _all(self) -> int:
        return round(self.total_rows / self.rows * (self.logits + self.labels))

    @property
    def host(self) -> int:
        """Returns the peak in bytes on the host: all arrays, twice while parts are concatenated."""
        return 2 * self._all if self._is_in_parts and self.concatenates else self._all

    def suggestion(self, limit: int) -> str:
        """Returns the flags with which the evaluation fits into `limit` bytes; empty if nothing helps."""
        free = limit - self.given
        rows = self.rows
        if self.forward > free:
            rows = int(self.rows * free / self.forward) if free > 0 else 0
            if rows < 1:
                return ""
        flags = [f"--per_device_eval_batch_size {rows}"] if rows < self.rows else []
        share = rows / self.rows
        if self.peak - self.given > free or flags:
            with_rows = replace(
                self,
                forward=round(self.forward * share),
                rows=rows,
                logits=round(self.logits * share),
                labels=round(self.labels * share),
            )
            if with_rows.peak > limit:
                flags += with_rows.collecting_flags(limit)
        return " ".join(flags)

    def collecting_flags(self, limit: int) -> list[str]:
        """Returns the flags with which the collected results fit."""
        less = ["preprocess_logits_for_metrics"] if self.logits > self.labels else []
        total = int(-(-self.total_rows // self.rows))
        for count in sorted({2**power for power in range(20) if 2**power < total}, reverse=True):
            if replace(self, accumulation=count).peak <= limit:
                return [" or ".join((f"--eval_accumulation_steps {count}", *less))]
        # An argmax leaves as many numbers as there are labels.
        if less and replace(self, logits=self.labels).peak <= limit:
            return less
        return ["--prediction_loss_only"]


def generation_phase(peak: int, rows: int, length: int) -> RunPhase:
    """Returns the phase of text generation; `rows` are the rows of the key-value cache, including beams."""
    return RunPhase(GENERATION, peak, note=f"the key-value cache of {rows} x {length} tokens at its end")


def generation_flags(peak: int, given: int, limit: int, steps: int, tokens: int) -> str:
    """Returns the flags with which the generation in a training step fits; empty if nothing helps.

    Args:
        steps: number of steps whose texts are generated together (TRL's `--steps_per_generation`); 0: unknown.
        tokens: maximum tokens generated per text; 0: unknown.
    """
    share = (limit - given) / (peak - given)
    if (fewer := int(steps * share)) >= 1:
        return f"--steps_per_generation {fewer}, or --use_vllm"
    shorter = int(tokens * steps * share)
    return f"--steps_per_generation 1 --max_completion_length {shorter}, or --use_vllm" if shorter >= 1 else ""


def evaluation_phase(evaluation: Evaluation, what: str) -> RunPhase:
    """Returns the phase of an evaluation.

    Args:
        what: the results that are collected beside labels, in words.
    """
    if not evaluation.logits + evaluation.labels:
        return RunPhase(EVALUATION, evaluation.peak, note="only the loss is collected")
    where = "until the end" if evaluation.is_on_host else "on the device until the end"
    if evaluation.accumulation is not None:
        where = f"on the device for {evaluation.accumulation} batches"
    note = f"{what} and labels are collected {where}, {gib_text(evaluation.collected)}"
    host = 0 if evaluation.is_on_host else evaluation.host
    return RunPhase(EVALUATION, evaluation.peak, host, note, evaluation.least)


@dataclass(frozen=True)
class DryRun:
    """The phases of a run that was not run.

    Attributes:
        header: a line about the Trainer, its model and its batch.
        limit: bytes that a phase may take: the device's memory, or a budget.
        phases: the phases, in the order of a run.
        timeline: the training step, operator by operator.
        suggestions: a line for each phase that exceeds the limit.
        evaluation: the evaluation; None without evaluation data.
    """

    header: str
    limit: int
    phases: tuple[RunPhase, ...]
    timeline: StepTimeline = field(repr=False)
    suggestions: tuple[str, ...] = ()
    evaluation: Evaluation | None = None

    def __str__(self) -> str:
        rows = [
            {
                "phase": phase.name,
                "peak": gib_text(phase.peak) if phase.peak else "-",
                "host": f"+ {gib_text(phase.host)}" if phase.host >= _SHOWN else "",
                "": phase.note,
            }
            for phase in self.phases
        ]
        grid = tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)
        fits = self.suggestions or (f"all phases fit into {gib_text(self.limit)}",)
        return "\n".join((self.header, grid, *fits, "", self.timeline.held_text("the training step")))


def train_suggestion(
    peak: int,
    given: int,
    limit: int,
    rows: int,
    micro_batches: int = 1,
    batch: int = 0,
    gradients: int = 0,
    checkpoints: bool = False,
) -> str:
    """Returns the line for a training step that does not fit, with the number of rows that would, if memory grows
    linearly with them.

    Args:
        given: bytes held before the step.
        micro_batches: number of micro-batches among these bytes.
        batch: bytes of each micro-batch.
        gradients: bytes of the gradients, which a step of several micro-batches holds from the first one on.
        checkpoints: whether the step already checkpoints its activations.
    """
    line = f"train needs {gib_text(peak)} of {gib_text(limit)}: "
    if micro_batches > 1 and batch and (count := micro_batches - -(-(peak - limit) // batch)) >= 1:
        held = f"Trainer holds all {micro_batches} micro-batches of an optimizer step on the device"
        return f"{line}--gradient_accumulation_steps {count}, because {held}"
    # The peak of a single micro-batch may have few of its gradients: most exist once activations are freed.
    accumulated = gradients if micro_batches == 1 else 0
    fewer = int(rows * (limit - given - accumulated) / (peak - given)) if peak > given else 0
    flags = "--memory_opt_budget" if checkpoints else f"{checkpointing_flag()}, or --memory_opt_budget"
    if fewer < 1:
        return f"{line}{flags}"
    separator = " or" if checkpoints else ","
    return f"{line}--per_device_train_batch_size {fewer} with more --gradient_accumulation_steps{separator} {flags}"


def suggestions(phases: Sequence[RunPhase], limit: int, flags: dict[str, str]) -> tuple[str, ...]:
    """Returns a line for each phase that exceeds the limit and is not one of `OF_ROWS`.

    Args:
        flags: the flags with which a phase fits, by the phase's name.
    """
    return tuple(
        f"{phase.name} needs {gib_text(phase.peak)} of {gib_text(limit)}: " + (flags.get(phase.name) or _NO_FLAG)
        for phase in phases
        if phase.peak > limit and phase.name not in OF_ROWS
    )


def host_suggestions(phases: Sequence[RunPhase], available: int) -> tuple[str, ...]:
    """Returns a line for each phase that takes more than the `available` bytes on the host."""
    flags = {EVALUATION: "preprocess_logits_for_metrics or --prediction_loss_only"}
    return tuple(
        f"{phase.name} needs {gib_text(phase.host)} on the host, where {gib_text(available)} are free: "
        + flags.get(phase.name, _NO_FLAG)
        for phase in phases
        if phase.host > available
    )


# Number of batches from which the collected tensors are copies.
_COPIED_FROM = 2
_NO_FLAG = "no Trainer flag makes it fit"
# Bytes on the host from which they are shown.
_SHOWN = 2**20
EVALUATION, GENERATION, NO_GRAD = "evaluation", "generation", "no-grad"
# Phases of the training step that take less with fewer rows.
OF_ROWS = ("forward", NO_GRAD, "backward", "optimizer")
