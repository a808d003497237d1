"""Where the callbacks' findings go: the package log, `trainer.log` (hence every tracker), and a JSON-lines file."""

import json
import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerState

from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger

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


def is_final(logs: Mapping[str, Any] | None) -> bool:
    """Whether these are the last logs of a training run, which Trainer writes just before `on_train_end`.

    What sums up a run is reported then: at `on_train_end` the trackers, called before us, have closed their runs, and
    a late number would make them open a new one.
    """
    return logs is not None and "train_runtime" in logs


def find_trainer(state: TrainerState) -> Trainer:
    """The Trainer that is firing the event which the caller handles; call it from `on_train_begin` only.

    A Trainer gives its callbacks no reference to itself, yet only `trainer.log` reaches every tracker: callbacks are
    appended after the trackers', so entries added to `logs` in `on_log` come too late. Every event is fired from a
    method of the Trainer, so it is up the stack, as the `self` whose `state` is the event's own.
    (Later in the run the frames in between hold batches, which looking into them may keep alive.)

    Raises:
        MemOptError: the event does not come from a Trainer.
    """
    frame = sys._getframe(1)
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
    """

    def __init__(self, kind: str, path: str | os.PathLike | None = None) -> None:
        self.kind = kind
        self.path = None if path is None else Path(path)
        self.active = False
        self._trainer: weakref.ref[Trainer] | None = None

    def begin(self, state: TrainerState) -> Trainer:
        """Find the Trainer of this run and return it; call it from `on_train_begin`."""
        trainer = find_trainer(state)
        # The Trainer owns the callback that owns this: a strong reference would keep a dropped Trainer, and with it
        # the model, until the next garbage collection.
        self._trainer = weakref.ref(trainer)
        self.active = state.is_world_process_zero
        return trainer

    def lines(self, text: str) -> None:
        """To the package log, at info."""
        if self.active:
            get_logger().info(text)

    def metrics(self, values: Mapping[str, float]) -> None:
        """To `trainer.log`, each name prefixed `memopt/`, at the Trainer's current global step."""
        trainer = self._trainer() if self.active and self._trainer is not None else None
        if trainer is None:
            return
        handler, control = trainer.callback_handler, trainer.control
        # Logging clears `should_log`: the Trainer's own record of this step, asked for by now, would be dropped. And
        # the console has our lines already, so what echoes each log there (progress bar, printer) is left out.
        should_log, callbacks = control.should_log, handler.callbacks
        handler.callbacks = [each for each in callbacks if not isinstance(each, (ProgressCallback, PrinterCallback))]
        try:
            trainer.log({METRIC_PREFIX + name: float(value) for name, value in values.items()})
        finally:
            control.should_log, handler.callbacks = should_log, callbacks

    def record(self, step: int, **fields: Any) -> None:
        """To the file: `{"step": step, "kind": kind, **fields}`."""
        if not self.active or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": self.kind, **fields}) + "\n")
