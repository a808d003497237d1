"""Reports findings of callbacks to the log, the file of `--memory_opt_log_file` and the Trainer's trackers; and base
classes for callbacks that hook a model or report only some of the steps."""

import contextlib
import copy
import errno
import json
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from optimum_memopt.errors import MemOptError, reason_of
from optimum_memopt.logs import LOG_LEVELS, get_logger, rank
from optimum_memopt.trainer_patches import Patch, TrainerPatches


class JsonLines:
    """A file to append records to; rank 0 creates it at once, so that an unwritable path fails early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost = False
        if rank() != 0:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise MemOptError(
                f"the log file {str(path)!r} cannot be written ({reason_of(error)}); choose another "
                "--memory_opt_log_file, or another path for the callback"
            ) from error

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write one line for each record."""
        if self._lost:
            return
        lines = "".join(f"{json.dumps(record)}\n" for record in records).encode()
        # A full disk ends the log, not the training.
        try:
            with self.path.open("ab", buffering=0) as file:
                end = os.fstat(file.fileno()).st_size
                if file.write(lines) < len(lines):
                    # Otherwise the next run's first record would be appended to half a line.
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._lost = True
            get_logger().warning(f"stopped writing the log file {self.path} ({reason_of(error)}); training continues")


# Several callbacks append to one file; an unwritable file is detected and reported once.
_files: "weakref.WeakValueDictionary[Path, JsonLines]" = weakref.WeakValueDictionary()


def json_lines(path: str | os.PathLike) -> JsonLines:
    """Returns the file at `path`, the same object for every caller while it is in use. Raises MemOptError."""
    # A later chdir must not move it.
    absolute = Path(path).absolute()
    file = _files.get(absolute)
    if file is None:
        file = _files[absolute] = JsonLines(absolute)
    return file


# A callback with a method of this name and `on_log`'s signature also gets the metrics.
HANDLER = "on_memopt_log"


def log_to_trackers(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Send metrics, at the current global step, to the Trainer's trackers.

    Trackers are the callbacks of `--report_to` (transformers' `INTEGRATION_TO_CALLBACK` and subclasses), whose
    `on_log` is called as Trainer calls it, and callbacks with a method `on_memopt_log`. Bypasses `trainer.log`, which
    trainers override to average and clear counters of their own (TRL), `state.log_history`, the progress bar and all
    other callbacks.
    """
    # Looked up each time, since other packages may add integrations to the table.
    trackers = tuple(integration_utils.INTEGRATION_TO_CALLBACK.values())
    for callback in trainer.callback_handler.callbacks:
        event = HANDLER if hasattr(callback, HANDLER) else "on_log"
        if event == HANDLER or isinstance(callback, trackers):
            handler = copy.copy(trainer.callback_handler)
            handler.callbacks = [callback]
            # A copy: a callback may change or return the control, by which the Trainer decides what happens next.
            control = copy.copy(trainer.control)
            with _own_steps_kept(callback, trainer.state.global_step):
                handler.call_event(event, trainer.args, trainer.state, control, logs=dict(metrics))


@contextlib.contextmanager
def _own_steps_kept(callback: TrainerCallback, global_step: int) -> Iterator[None]:
    """Set DVCLive's step to `global_step` within the block, and restore it afterwards.

    DVCLive counts calls of `on_log` instead of reading `global_step` (transformers 5.23, `DVCLiveCallback.on_log` ends
    in `live.next_step()`), so our calls would shift the Trainer's own curves.
    """
    live = callback.live if isinstance(callback, integration_utils.DVCLiveCallback) else None
    if live is None:
        yield
        return
    step, live.step = live.step, global_step
    try:
        yield
    finally:
        live.step = step


def is_due(step: int, log_steps: int) -> bool:
    """True if step `step` (from 0) is reported: every `log_steps`; with `log_steps` 0, steps 0-9 and then powers of
    two, as in ONNX Runtime's memory observer (ortmodule/_runtime_inspector.py)."""
    if log_steps:
        return step % log_steps == 0
    return step < 10 or step & (step - 1) == 0


def is_printed(step: int, log_steps: int) -> bool:
    """True if a due step `step` is also shown at info: with `log_steps` 0 only steps 0, 1, 2, 4, 8, …, since ten
    similar steps would bury informative lines."""
    return bool(log_steps) or step & (step - 1) == 0


def is_final(logs: Mapping[str, Any] | None) -> bool:
    """True for the last logs of a training run, which Trainer writes just before `on_train_end`.

    Summaries of a run are reported then: at `on_train_end` the trackers, called before us, have closed their runs, and
    a late metric would make them open a new one. (`train_runtime` does not identify these logs: with
    `include_num_input_tokens_seen` Trainer puts it into every entry.)
    """
    return logs is not None and "train_loss" in logs


def find_trainer(state: TrainerState) -> Trainer:
    """Returns the Trainer that fires the event which the caller handles; call it from `on_train_begin` only.

    A Trainer gives its callbacks no reference to itself, but only it knows the trackers. Every event is fired from a
    method of the Trainer, so it is on the stack, as the `self` whose `state` is the event's state. (Later in the run
    the frames in between hold batches, which reading their locals may keep alive.) Raises MemOptError if there is
    none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and owner.state is state:
            return owner
        frame = frame.f_back
    raise MemOptError("this callback works only in a transformers.Trainer, and its event was fired by something else")


CallbackT = TypeVar("CallbackT", bound=TrainerCallback)


def callback_of(trainer: Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Returns the Trainer's first callback of class `kind`, or None."""
    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, kind)), None)


class Reporter:
    """Writes a callback's findings, on global rank 0 only (on other ranks every method does nothing).

    Args:
        kind: name of the callback in the JSON-lines file: `memory_phases`, `input_density`, `plan_stats`.
        path: JSON-lines file to append to, one object per record; None: no file. Raises MemOptError if it cannot be
            written.
    """

    def __init__(self, kind: str, path: str | os.PathLike | None = None) -> None:
        self.kind = kind
        self.active = False
        self._file = None if path is None else json_lines(path)
        self._trainer: weakref.ref[Trainer] | None = None

    def belongs_to(self, trainer: Trainer) -> None:
        """Set the Trainer of the next runs, which `begin` otherwise searches for."""
        # The Trainer owns the callback that owns this: a strong reference would keep a dropped Trainer, and with it
        # the model, until the next garbage collection.
        self._trainer = weakref.ref(trainer)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no Trainer yet.
        return {**vars(self), "_trainer": None}

    @property
    def trainer(self) -> Trainer | None:
        """Returns the Trainer; None before the first run, and after it has been deleted."""
        return self._trainer() if self._trainer is not None else None

    def begin(self, state: TrainerState) -> Trainer:
        """Return the Trainer of this run; call it from `on_train_begin`."""
        trainer = self.trainer
        if trainer is None or trainer.state is not state:
            trainer = find_trainer(state)
            self.belongs_to(trainer)
        self.active = state.is_world_process_zero
        return trainer

    def lines(self, text: str, level: str = "info") -> None:
        """Write text to the package log, at a level named in `LOG_LEVELS`."""
        if self.active:
            get_logger().log(LOG_LEVELS[level], text)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Send metrics to the trackers only, names prefixed with `memopt/`, at the Trainer's current global step."""
        if self.active and (trainer := self.trainer) is not None:
            log_to_trackers(trainer, {f"memopt/{name}": float(value) for name, value in values.items()})

    def records(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append a record to the file for each row: `{"step": step, "kind": kind, **row}`."""
        if self.active and self._file is not None:
            self._file.append({"step": step, "kind": self.kind, **row} for row in rows)


class HookingCallback(TrainerCallback):
    """Base class of callbacks with hooks, which it removes when `train()` ends.

    Hooks are removed even after an error if the Trainer has an engine (`attach`) or got such a callback in its
    constructor. In other Trainers they stay after an error, until the next `train()`.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._hooks = TrainerPatches()

    def remove_hooks(self) -> None:
        """Restore the model and the Trainer; a second call does nothing."""
        self._hooks.close()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = find_trainer(state)
        # Otherwise another callback or a subclass has already wrapped it.
        if "train" not in vars(trainer):
            TrainerPatches().put(trainer, Patch.REMOVED_HOOKS, removing_hooks(trainer))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.remove_hooks()


class StepCallback(HookingCallback):
    """Base class of callbacks that report some of the steps of a run, on global rank 0.

    Args:
        kind: see `Reporter`.
        log_steps: see `is_due`. Raises MemOptError if it is negative.
    """

    def __init__(self, kind: str, log_steps: int, path: str | os.PathLike | None) -> None:
        if log_steps < 0:
            raise MemOptError(f"log_steps is {log_steps}; allowed: 0 (steps 0-9, then powers of two) or every N steps")
        super().__init__(Reporter(kind, path))
        self._log_steps, self._first_step, self._due = log_steps, 0, False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.remove_hooks()  # left by a run that failed
        self._first_step, self._due = state.global_step, False
        self.reporter.begin(state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._due = self.reporter.active and is_due(state.global_step - self._first_step, self._log_steps)

    def _is_printed(self, step: int) -> bool:
        return is_printed(step - self._first_step, self._log_steps)


@contextlib.contextmanager
def removing_hooks(trainer: Trainer) -> Iterator[None]:
    """Run `train()`, then remove the hooks of all callbacks."""
    try:
        yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, HookingCallback):
                callback.remove_hooks()
