"""The report about a training step that ran out of memory: what was held, when, and what would have fit.
The failure is read before any of the step's memory is freed."""

import gc
import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.cache_files import write_file
from optimum_memopt.compat.bitsandbytes import buffers_of
from optimum_memopt.compat.torch import tensor_bytes
from optimum_memopt.compat.transformers import train_batch_size
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.explanations import (
    OPTIMIZER_STEP,
    Explanation,
    FailedStep,
    Failure,
    ForwardCall,
    Moment,
    Part,
    Place,
    Suggestion,
    TensorLike,
    place_of,
)
from optimum_memopt.engines.api.predictions import (
    BATCH,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    OUTPUTS,
    PARAMETERS,
    RECOMPUTED,
    SAVED,
    TEMPORARY,
    Group,
)
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import factory, predicting_factory
from optimum_memopt.errors import clear_frames, is_out_of_memory, line_of, shortage, with_causes
from optimum_memopt.logs import get_logger, rank
from optimum_memopt.memory import process
from optimum_memopt.memory.optimizers import state_tensors
from optimum_memopt.memory.peak_monitor import held_bytes, peak_bytes
from optimum_memopt.sizes import gib_text
from optimum_memopt.training.batches import run_of


@dataclass(frozen=True)
class StepStart:
    """The memory of the process when a forward and backward began, in bytes.

    Attributes:
        held: bytes held at that moment.
        peak: the peak until then.
        has_gradients: whether gradients of earlier micro-batches exist.
        kept: see `process.kept_bytes`; 0 on devices other than the CPU.
    """

    held: int
    peak: int
    has_gradients: bool
    kept: int

    @classmethod
    def of(cls, trainer: Trainer) -> "StepStart":
        device = trainer.args.device
        # Checks all parameters: the first may belong to a head under `no_grad`, without gradients.
        has_gradients = any(parameter.grad is not None for parameter in model_of(trainer).parameters())
        return cls(held_bytes(device), peak_bytes(device), has_gradients, _kept(device))


def held_at_start(trainer: Trainer, start: StepStart, call: ForwardCall | None) -> dict[str, int]:
    """Returns the bytes held when a forward and backward began, by category.

    `OTHER` belongs to no tensor of the model, optimizer or batch. If there is more of it after the step's memory is
    freed, the larger value is taken.
    """
    model = model_of(trainer)
    parameters = tensor_bytes([*model.parameters(), *buffers_of(model)])
    optimizer = 0 if trainer.optimizer is None else tensor_bytes(state_tensors(trainer.optimizer))
    batch = sum(tensor.bytes for tensor in call.tensors.values()) if call is not None else 0
    tensors, gradients = parameters + optimizer + batch, gradient_bytes(trainer)
    # Gradients of earlier micro-batches are updated in place.
    accumulated = gradients if start.has_gradients else 0
    # May be more than at the start, since a first forward imports and compiles.
    now = held_bytes(trainer.args.device) - tensors - gradients
    other = max(0, start.held - tensors - accumulated, now)
    return {PARAMETERS: parameters, GRADIENTS: accumulated, OPTIMIZER: optimizer, BATCH: batch, OTHER: other}


def failure_of(error: Exception, trainer: Trainer, start: StepStart, place: Place | None = None) -> Failure:
    """Returns the failure that an error reports, read before anything is freed; `place`: the place, if known."""
    (requested, allocated), device = shortage(error), trainer.args.device
    # Memory held by a backward or another runtime is already free when its error is caught here.
    highest = peak_bytes(device)
    held = allocated or (highest if highest > start.peak else held_bytes(device))
    place = place or place_of(error.__traceback__, model_of(trainer))
    return Failure(line_of(error), place, held, requested, max(0, _kept(device) - start.kept))


def free_step(error: BaseException) -> None:
    """Free the memory that a failed step holds."""
    clear_frames(error)
    gc.collect()
    process.trim()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forward_call(args: Any, kwargs: Any, reader: str) -> ForwardCall:
    return ForwardCall(_alike(args), _alike(kwargs), reader)


def _alike(given: Any) -> Any:
    """Returns a value with its tensors, also those in containers, replaced by `TensorLike`."""
    if isinstance(given, torch.Tensor):
        return TensorLike.of(given)
    if isinstance(given, Mapping):
        return {key: _alike(value) for key, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)(map(_alike, given))
    return given


def model_of(trainer: Trainer) -> torch.nn.Module:
    model = trainer.model
    assert isinstance(model, torch.nn.Module)
    return model


def gradient_bytes(trainer: Trainer) -> int:
    return tensor_bytes(p.grad for p in model_of(trainer).parameters() if p.grad is not None)


def _kept(device: torch.device) -> int:
    return process.kept_bytes() if device.type == "cpu" else 0


_NAME = "memory_report"
# Maximum rows per category in the log; the files have all rows.
_SHOWN = 5
_MIXED_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Recompute does not help in the optimizer's step: the activations are freed by then.
_FEWER_STATES = "an optimizer with smaller states needs less, such as --optim adamw_8bit or adafactor; so does LoRA"


@dataclass(frozen=True)
class MemoryReport:
    """A training step that ran out of memory.

    Attributes:
        error: first line of the error.
        step: number of optimizer steps completed before.
        device: device type, such as `cuda`.
        engine: the engine that trained the model, and its plan.
        rows: rows of the micro-batch that failed.
        accumulation: micro-batches of an optimizer step.
        sizes: shape of each input of that micro-batch, such as `input_ids` to `64 x 128`.
        held: bytes held when the allocation failed: allocated on CUDA, resident on a CPU.
        requested: bytes of that allocation; None: the error does not say.
        parts: the held memory by category, in the order of the categories.
        suggestions: settings that would have fit, the recommended one first.
        remarks: a line for everything that is inexact or unknown.
    """

    error: str
    step: int
    rank: int
    model: str
    device: str
    engine: str
    rows: int
    accumulation: int
    sizes: Mapping[str, str]
    held: int
    requested: int | None
    moment: Moment
    parts: tuple[Part, ...]
    suggestions: tuple[Suggestion, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def accounted(self) -> float:
        """Returns the share of `held` that the parts add up to."""
        return sum(part.bytes for part in self.parts) / self.held if self.held else 0.0

    def to_text(self) -> str:
        """Returns the report as text for one screen."""
        lines = [
            *self._heading,
            "",
            "held at that moment",
            *(_row(part.category, part.bytes, part.bytes / self.held) for part in self.parts if part.bytes),
            f"  {'accounted for':<76}{self.accounted:>20.1%}",
        ]
        for part in self.parts:
            if shown := part.tensors[:_SHOWN]:
                lines += ["", f"largest {part.category}"]
                lines += [_row(_named(each), each.bytes, each.bytes / self.held) for each in shown]
        lines += ["", "suggestions"] + ([*map(_suggestion_line, self.suggestions)] or ["  none found"])
        return "\n".join([*lines, *(f"note: {remark}" for remark in self.remarks)])

    def to_markdown(self) -> str:
        """Returns the report as Markdown tables with all rows."""
        lines = [f"# {self._heading[0]}", "", *(f"{line.strip()}  " for line in self._heading[1:]), ""]
        lines += ["## Held at that moment", "", "| category | bytes | share |", "|---|---:|---:|"]
        lines += [
            f"| {part.category} | {gib_text(part.bytes)} | {part.bytes / self.held:.1%} |" for part in self.parts
        ]
        lines += [f"| accounted for | | {self.accounted:.1%} |", ""]
        for part in self.parts:
            if part.tensors:
                lines += [
                    f"## {part.category.capitalize()}",
                    "",
                    "| row | module | tensors | bytes |",
                    "|---|---|---:|---:|",
                ]
                rows = ((each.name, each.where, each.count or "", gib_text(each.bytes)) for each in part.tensors)
                lines += [*("| {} | {} | {} | {} |".format(*row) for row in rows), ""]
        lines += ["## Suggestions", ""]
        if self.suggestions:
            lines += ["| flags | predicted peak | time | |", "|---|---:|---:|---|"]
            for each in self.suggestions:
                lines.append(f"| `{each.flags}` | {gib_text(each.peak)} | {_time(each)} | {each.what} |")
        else:
            lines += ["None found."]
        return "\n".join([*lines, "", *(f"- {remark}" for remark in self.remarks), ""])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "accounted": self.accounted}

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write `memory_report.json` and `.md`, with the rank in the name on ranks other than 0. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        name = _NAME if self.rank == 0 else f"{_NAME}_rank{self.rank}"
        written = {".json": json.dumps(self.to_dict(), indent=1) + "\n", ".md": self.to_markdown()}
        for suffix, text in written.items():
            write_file(folder / f"{name}{suffix}", text.encode())
        return tuple(folder / f"{name}{suffix}" for suffix in written)

    @property
    def _heading(self) -> list[str]:
        rank = f" on rank {self.rank}" if self.rank else ""
        more = f", and {gib_text(self.requested)} more did not fit" if self.requested else ""
        sizes = ", ".join(f"{name} {shape}" for name, shape in self.sizes.items())
        accumulated = f", {self.accumulation} micro-batches per optimizer step" if self.accumulation > 1 else ""
        return [
            f"memory ran out in step {self.step + 1}{rank}: {gib_text(self.held)} held{more}",
            f"  {self.model} on {self.device}, {self.engine}",
            f"  micro-batch of {self.rows} rows{accumulated}{f' ({sizes})' if sizes else ''}",
            f"  {self.moment}",
        ]


def _row(name: str, size: int, share: float) -> str:
    return f"  {name:<76}{gib_text(size):>12}{share:>8.1%}"


def _suggestion_line(suggestion: Suggestion) -> str:
    figures = f"predicted peak {gib_text(suggestion.peak)}, time {_time(suggestion)}"
    return f"  {suggestion.flags}\n      {figures}: {suggestion.what}"


def _time(suggestion: Suggestion) -> str:
    return "not known" if suggestion.extra_time is None else f"{suggestion.extra_time:+.1%}"


def _named(tensors: Group) -> str:
    """Returns the name and place of a group, such as `Gelu+ in model.layers.*.mlp x 16`."""
    return " in ".join(filter(None, (tensors.name, tensors.where)))


def report_of(
    failure: Failure, trainer: Trainer, start: StepStart, call: ForwardCall | None, first_outside: int
) -> MemoryReport:
    """Returns the report about a failure whose memory has been freed.

    Args:
        call: call of the model's last training forward; None: there was none.
        first_outside: `OTHER` bytes before the run's first step, when a CPU's malloc keeps nothing of earlier steps.
    """
    model, args = model_of(trainer), trainer.args
    engine = engine_of(model)
    held = held_at_start(trainer, start, call)
    explained = _explained(failure, trainer, held, call, engine)
    if in_optimizer := failure.place.phase == OPTIMIZER_STEP:
        held[GRADIENTS] = gradient_bytes(trainer)
    inputs = call.tensors if call is not None else {}
    return MemoryReport(
        error=failure.error,
        step=trainer.state.global_step,
        rank=rank(),
        model=type(model).__name__,
        device=args.device.type,
        engine=_trained_by(engine),
        rows=train_batch_size(trainer),
        accumulation=args.gradient_accumulation_steps,
        sizes={name: " x ".join(map(str, tensor.shape)) for name, tensor in inputs.items() if tensor.shape},
        held=failure.held,
        requested=failure.requested,
        moment=explained.moment,
        parts=_parts(failure, held, explained.parts, first_outside, engine),
        suggestions=explained.suggestions,
        remarks=(*((_FEWER_STATES,) if in_optimizer else ()), *explained.remarks),
    )


def _explained(
    failure: Failure, trainer: Trainer, held: Mapping[str, int], call: ForwardCall | None, engine: Engine | None
) -> Explanation:
    moment = Moment(failure.place.phase, failure.place.module, failure.place.operator)
    if call is None:
        return Explanation(moment, (), (), ("no forward of the model has run",))
    # The step's error is being handled, so it is among the causes of any error raised here.
    failed_with = sys.exc_info()[1]
    failed = FailedStep(
        **vars(failure),
        model=model_of(trainer),
        call=call,
        outside=held[OTHER],
        accumulated=held[GRADIENTS],
        engine=engine,
        run=run_of(trainer),
        rows=train_batch_size(trainer),
        accumulation=trainer.args.gradient_accumulation_steps,
        autocast=_MIXED_PRECISION.get(trainer.accelerator.mixed_precision),
    )
    try:
        return predicting_factory().explain(failed)
    except Exception as second:
        get_logger().debug("the failed step could not be traced", exc_info=second)
        return Explanation(moment, (), (), _untraced(second, failed_with))


def _parts(
    failure: Failure, held: Mapping[str, int], of_graphs: Iterable[Part], first_outside: int, engine: Engine | None
) -> tuple[Part, ...]:
    """Returns the bytes by category: `held` when the step began plus `of_graphs`, which is empty if already freed."""
    outside, by_category = held[OTHER], {part.category: part for part in of_graphs}
    rest = failure.held - sum(held.values())
    if not by_category:
        category = TEMPORARY if failure.place.phase == OPTIMIZER_STEP else SAVED
        by_category = {category: Part(category, max(0, rest))}
    elif (excess := sum(part.bytes for part in by_category.values()) - rest) > 0:
        # This step has reused memory that malloc had kept.
        outside -= max(0, min(excess, outside - first_outside))
    elif excess < 0 and engine is not None and not factory(engine.name).predicts:
        # The engine's runtime holds tensors that are in no PyTorch graph.
        part = by_category.get(TEMPORARY, Part(TEMPORARY, 0))
        own = Group(TEMPORARY, f"other tensors of the {engine.name} engine", 0, -excess)
        by_category[TEMPORARY] = Part(TEMPORARY, part.bytes - excess, (own, *part.tensors))
    else:
        outside += min(-excess, failure.kept)
    parts = []
    for category in (*(category for category in held if category != OTHER), SAVED, OUTPUTS, RECOMPUTED, TEMPORARY):
        part = by_category.get(category, Part(category, 0))
        parts.append(Part(category, part.bytes + held.get(category, 0), part.tensors))
    return (*parts, Part(OTHER, outside))


def _untraced(error: Exception, failed_with: BaseException | None) -> tuple[str, ...]:
    """Returns the remarks for a step that could not be traced; `failed_with` is the step's own error."""
    causes = itertools.takewhile(lambda cause: cause is not failed_with, with_causes(error))
    own = ("tracing needs a few hundred MiB of the process's own memory, which are not available",)
    return (
        f"the step could not be traced ({line_of(error)})",
        *(own if any(map(is_out_of_memory, causes)) else ()),
        "try half of --per_device_train_batch_size and twice --gradient_accumulation_steps",
    )


def _trained_by(engine: Engine | None) -> str:
    if engine is None:
        return "plain PyTorch"
    table = engine.plans()
    return table.header[0] if table is not None and table.header else f"{engine.name} engine"
