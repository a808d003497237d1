"""Reports input density: the share of a step's tokens that are not padding."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import StepCallback, is_final
from optimum_memopt.compat.transformers import embeddings
from optimum_memopt.trainer_patches import Patch

# The label that torch's losses, and so transformers' models and label smoother, ignore by default.
IGNORE_INDEX = -100

_NAMES = "STEP", "INPUT TYPE", "INPUT NAME", "PAD IDX", "DENSITY", "VALID TOKENS", "TOTAL TOKENS", "VALID TOKENS/BATCH"
_ROW = "| {!s:10} | {!s:10} | {!s:20} | {!s:10} | {!s:10} | {!s:15} | {!s:15} | {!s:18} |"
_ROWS_SHOWN = 8
_MOST_POINTS = 512


@dataclass(frozen=True)
class Density:
    """Valid tokens of a tensor: `rows` holds the count of each row (first dimension), `total` counts all tokens."""

    rows: tuple[int, ...]
    total: int

    @property
    def valid(self) -> int:
        return sum(self.rows)

    @property
    def percent(self) -> float:
        """Returns valid tokens in percent of total tokens; 100 for a tensor without elements, as it has no padding."""
        return 100.0 * self.valid / self.total if self.total else 100.0


def valid_per_row(tensor: torch.Tensor, padding_index: int | None) -> torch.Tensor:
    """Returns how many elements of each row differ from `padding_index` (None: all are valid).

    Takes (batch, ...), also (batch,) and a scalar, which is one row; returns (batch,), int64, on the tensor's device,
    without synchronizing.
    """
    rows = tensor.reshape(1, 1) if tensor.dim() == 0 else tensor.unsqueeze(-1).flatten(1)
    valid = torch.ones_like(rows, dtype=torch.bool) if padding_index is None else rows != padding_index
    return valid.sum(dim=1)


def valid_count(tensor: torch.Tensor, padding_index: int | None) -> torch.Tensor | int:
    """Returns the sum of `valid_per_row`: on the CPU a number, else a scalar tensor, without synchronizing."""
    if padding_index is None:
        return tensor.numel()
    if tensor.device.type == "cpu":
        return int(np.count_nonzero(tensor.numpy() != padding_index))  # takes a third of the time of torch's two ops
    return (tensor != padding_index).sum()


@dataclass(frozen=True)
class Padding:
    """The padding marker of one input: `index` in the ids, zeros in the input `mask`, or neither."""

    index: int | None = None
    mask: str | None = None

    def __str__(self) -> str:
        return "mask" if self.mask else "none" if self.index is None else str(self.index)

    def counted_in(self, name: str, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int | None]:
        """Returns the tensor to count in for the input `name`, and the value that marks padding in it."""
        if self.mask is not None and _is_mask_of(batch.get(self.mask), batch[name]):
            return batch[self.mask], 0
        return batch[name], self.index


def _is_mask_of(mask: Any, ids: torch.Tensor) -> bool:
    return isinstance(mask, torch.Tensor) and mask.shape == ids.shape


def _is_integer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype != torch.bool


def embedding_inputs(batch: Mapping[str, Any], main_input: str | None) -> list[str]:
    """Returns the names of the inputs that hold token ids for an embedding, which may include padding.

    In transformers these are `input_ids`, `decoder_input_ids` and the like, and a model's `main_input_name` if it
    holds integers. `token_type_ids` and `position_ids` feed embeddings too, but have no padding index of their own.
    """
    return [name for name in batch if ("input_ids" in name or name == main_input) and _is_integer(batch[name])]


def label_inputs(batch: Mapping[str, Any], label_names: list[str]) -> list[str]:
    """Returns the names of labels that hold classes; float labels (regression, multi-label) ignore nothing."""
    return [name for name in dict.fromkeys([*label_names, "labels"]) if _is_integer(batch.get(name))]


def padding_of(name: str, batch: Mapping[str, Any], processing_class: Any, model: torch.nn.Module | None) -> Padding:
    """Returns the padding marker of the embedding input `name` in this batch.

    The index is the tokenizer's, else the input embedding's, else the config's. If there is none, or if it is also a
    real token (the end of text in GPT-2 style set-ups, the first decoder token of T5), the input's attention mask is
    more reliable, if the batch has one.
    """
    config = getattr(model, "config", None)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    index = getattr(tokenizer, "pad_token_id", None)
    real = getattr(tokenizer, "eos_token_id", None)
    if index is None:
        real = getattr(config, "eos_token_id", None)
        index = None if model is None else getattr(embeddings(model, "input"), "padding_idx", None)
    if index is None:
        index = getattr(config, "pad_token_id", None)
    real = list(real) if isinstance(real, (list, tuple)) else [real]
    if name.startswith("decoder_"):
        real.append(getattr(config, "decoder_start_token_id", None))
    mask = name.replace("input_ids", "attention_mask")
    if (index is None or index in real) and mask != name and _is_mask_of(batch.get(mask), batch[name]):
        return Padding(index=index, mask=mask)
    return Padding(index=index)


def thinned(points: Sequence[Any], most: int) -> list[Any]:
    """Returns every second point and the last one if there are more than `most`, else all points."""
    return list(points) if len(points) <= most else [*points[:-1:2], points[-1]]


@dataclass
class _Tally:
    """Counts of one input over the micro-batches of a reported step and over the run, on the device until reported."""

    kind: str
    padding: Padding
    step_rows: list[torch.Tensor] = field(default_factory=list)
    step_total: int = 0
    run_valid: torch.Tensor | int = 0
    run_total: int = 0

    def add(self, batch: Mapping[str, Any], name: str, is_reported: bool) -> None:
        tensor, index = self.padding.counted_in(name, batch)
        self.run_valid += valid_count(tensor, index)
        self.run_total += tensor.numel()
        if is_reported:
            self.step_rows.append(valid_per_row(tensor, index))
            self.step_total += tensor.numel()

    def step(self) -> Density:
        return Density(rows=tuple(torch.cat(self.step_rows).tolist()), total=self.step_total)

    def run(self) -> Density:
        return Density(rows=(int(self.run_valid),), total=self.run_total)


def _rows_cell(rows: tuple[int, ...]) -> str:
    if len(rows) <= _ROWS_SHOWN:
        return str(list(rows))
    return f"{len(rows)} rows of {min(rows)} to {max(rows)}, mean {sum(rows) / len(rows):.1f}"


class InputDensityCallback(StepCallback):
    """Logs the density of each embedding input and label, with the columns of ONNX Runtime's observer.

    A step is all micro-batches of one optimizer step in this process (rank 0's share of the batch). PAD IDX says what
    counts as padding: an index, `mask` for zeros of the attention mask (see `padding_of`), or `none`.
    VALID TOKENS/BATCH is the number of valid tokens in each row. Steps count from 0, as in ONNX Runtime; trackers
    get the Trainer's own `global_step`.

    It reads the batches that the Trainer passes to `training_step`, before label smoothing removes the labels, so it
    works with any engine. Counts stay on the batch's device until a step is reported, so other steps do not
    synchronize. The file and the trackers get all reported steps, the log some of them (`is_printed`), or all of them
    on `devinfo`.

    Args:
        log_steps: report every N steps; 0 reports steps 0-9 of the run and then steps at powers of two.
        path: JSON-lines file to append the same numbers to.

    Attributes:
        densities: (optimizer step, percent that is not padding) points of each input; thinned out in a long run.
    """

    def __init__(self, log_steps: int = 0, path: str | os.PathLike | None = None) -> None:
        super().__init__("input_density", log_steps, path)
        self.densities: dict[str, list[tuple[int, float]]] = {}
        self._tallies: dict[str, _Tally] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._tallies, self.densities = {}, {}
        if self.reporter.active and (trainer := self.reporter.trainer) is not None:
            self._hooks.put(trainer, Patch.COUNTED_TOKENS, functools.partial(self._counting, trainer))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        for tally in self._tallies.values() if self._due else ():
            tally.step_rows, tally.step_total = [], 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self._due:
            return
        self._due = False
        step = state.global_step - 1
        counted = {name: tally.step() for name, tally in self._tallies.items() if tally.step_rows}
        self._report(step, counted, "", "info" if self._is_printed(step) else "devinfo")
        for name, found in counted.items():
            points = [*self.densities.get(name, ()), (state.global_step, found.percent)]
            self.densities[name] = thinned(points, _MOST_POINTS)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.reporter.active and is_final(kwargs.get("logs")):
            self._report(state.global_step, {name: tally.run() for name, tally in self._tallies.items()}, "run_")

    def _report(self, step: int, densities: Mapping[str, Density], scope: str, level: str = "info") -> None:
        """Report a step (`scope` empty) or the run (`scope` is `run_`), which omits counts per row."""
        if not densities:
            return
        table = ["input density (valid tokens / all tokens)", _ROW.format(*_NAMES)]
        metrics: dict[str, float] = {}
        records: list[dict[str, Any]] = []
        for name, found in densities.items():
            tally = self._tallies[name]
            rows = None if scope or tally.kind == "LABEL" else found.rows
            cells = (f"{found.percent:.2f}%", found.valid, found.total, "N/A" if rows is None else _rows_cell(rows))
            table.append(_ROW.format("run" if scope else step, tally.kind, name, tally.padding, *cells))
            values = {"density": found.percent, "valid_tokens": found.valid, "total_tokens": found.total}
            metrics |= {f"{scope}{what}/{name}": value for what, value in values.items()}
            record = {"scope": "run" if scope else "step", "input": name, "input_type": tally.kind}
            records.append({**record, "padding": str(tally.padding), "valid_tokens_per_row": rows, **values})
        self.reporter.lines("\n".join(table), level)
        self.reporter.metrics(metrics)
        self.reporter.records(step, records)

    def _count(self, batch: Any, trainer: Trainer) -> None:
        if not isinstance(batch, Mapping):
            return
        labels = label_inputs(batch, trainer.label_names)
        inputs = embedding_inputs(batch, getattr(trainer.model, "main_input_name", None))
        for name in (name for name in inputs if name not in labels):
            if name not in self._tallies:
                mark = padding_of(name, batch, trainer.processing_class, trainer.model)
                self._tallies[name] = _Tally("EMBED", mark)
                if mark.mask:
                    why = "no padding index is known" if mark.index is None else f"{mark.index} is a real token too"
                    self.reporter.lines(f"density of {name}: counting padding by {mark.mask}, since {why}")
            self._tallies[name].add(batch, name, self._due)
        for name in labels:
            self._tallies.setdefault(name, _Tally("LABEL", Padding(index=IGNORE_INDEX))).add(batch, name, self._due)

    def _counting(self, trainer: Trainer, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def count_and_step(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._count(inputs, trainer)
            return training_step(model, inputs, *args, **kwargs)

        return count_and_step
