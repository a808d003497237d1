"""Where callbacks report to: the package log, the Trainer's trackers, and a JSON-lines file."""

import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerState

from optimum_memopt.callbacks.json_lines import json_lines
from optimum_memopt.callbacks.trackers import log_to_trackers
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import LOG_LEVELS, get_logger

METRIC_PREFIX = "memopt/"


def check_log_steps(log_steps: int) -> int:
    """`log_steps` as it is; MemOptError when it is negative."""
    if log_steps < 0:
        raise MemOptError(f"log_steps is {log_steps}; allowed: 0 (steps 0-9, then powers of two) or every N steps")
    return log_steps


def is_due(step: int, log_steps: int) -> bool:
    """Whether step `step` (from 0) is reported: every `log_steps`, or with 0 steps 0-9 and then powers of two, as
    ONNX Runtime's memory observer does (ortmodule/_runtime_inspector.py).
    """
    if log_steps:
        return step % log_steps == 0
    return step < 10 or step & (step - 1) == 0


def is_printed(step: int, log_steps: int) -> bool:
    """Whether step `step`, which is due, is also shown at info: with `log_steps` 0 steps 0, 1, 2, 4, 8, …, since ten
    steps that are alike bury the lines that tell something."""
    return bool(log_steps) or step & (step - 1) == 0


def is_final(logs: Mapping[str, Any] | None) -> bool:
    """Whether these are the last logs of a training run, which Trainer writes just before `on_train_end`.

    What sums up a run is reported then: at `on_train_end` the trackers, called before us, have closed their runs, and
    a late number would make them open a new one. (`train_runtime` is no sign of it: with
    `include_num_input_tokens_seen` Trainer puts that into every entry.)
    """
    return logs is not None and "train_loss" in logs


def find_trainer(state: TrainerState) -> Trainer:
    """The Trainer that is firing the event which the caller handles; call it from `on_train_begin` only.

    A Trainer gives its callbacks no reference to itself, yet the trackers are in its list of callbacks. Every event is
    fired from a method of the Trainer, so it is up the stack, as the `self` whose `state` is the event's own.
    (Later in the run the frames in between hold batches, which looking into them may keep alive.)

    Raises:
        MemOptError: the event does not come from a Trainer.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and owner.state is state:
            return owner
        frame = frame.f_back
    raise MemOptError("this callback works in a transformers.Trainer only: its event was fired by something else")


class Reporter:
    """Writes what a callback found, on the world's rank 0 only (elsewhere every method does nothing).

    Args:
        kind: name of the callback in the JSON-lines file: `memory_phases`, `input_density`, `plan_stats`.
        path: JSON-lines file to append to, one object a record; None writes no file.

    Raises:
        MemOptError: the file cannot be written.
    """

    def __init__(self, kind: str, path: str | os.PathLike | None = None) -> None:
        self.kind = kind
        self.active = False
        self._file = None if path is None else json_lines(path)
        self._trainer: weakref.ref[Trainer] | None = None

    def belongs_to(self, trainer: Trainer) -> None:
        """Name the Trainer of the next runs, which `begin` otherwise looks for."""
        # The Trainer owns the callback that owns this: a strong reference would keep a dropped Trainer, and with it
        # the model, until the next garbage collection.
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer of this run; None before the first one, and when it is gone."""
        return self._trainer() if self._trainer is not None else None

    def begin(self, state: TrainerState) -> Trainer:
        """Return the Trainer of this run; call it from `on_train_begin`."""
        trainer = self.trainer
        if trainer is None or trainer.state is not state:
            trainer = find_trainer(state)
            self.belongs_to(trainer)
        self.active = state.is_world_process_zero
        return trainer

    def shows(self, level: str = "info") -> bool:
        """Whether `lines` at this level (a key of `LOG_LEVELS`) come to anything."""
        return self.active and get_logger().isEnabledFor(LOG_LEVELS[level])

    def lines(self, text: str, level: str = "info") -> None:
        """To the package log."""
        if self.active:
            get_logger().log(LOG_LEVELS[level], text)

    def metrics(self, values: Mapping[str, float]) -> None:
        """To the trackers alone, each name prefixed `memopt/`, at the Trainer's current global step."""
        if self.active and (trainer := self.trainer) is not None:
            log_to_trackers(trainer, {METRIC_PREFIX + name: float(value) for name, value in values.items()})

    def records(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """To the file, for each row: `{"step": step, "kind": kind, **row}`."""
        if self.active and self._file is not None:
            self._file.append({"step": step, "kind": self.kind, **row} for row in rows)
