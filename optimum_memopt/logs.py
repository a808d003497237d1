"""The package's logger, which logs on rank 0 without breaking progress bars, and progress lines of long tasks."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

import torch
from tqdm.auto import tqdm

from optimum_memopt.errors import MemOptError, line_of

LOGGER_NAME = "optimum_memopt"
_ANY_RANK = "is_of_any_rank"

# Names as in ONNX Runtime (onnxruntime/training/ortmodule/options.py, LogLevel): `devinfo` is between info and verbose
# and the first level at which every rank logs.
LOG_LEVELS = {"warning": logging.WARNING, "info": logging.INFO, "devinfo": logging.INFO - 5, "verbose": logging.DEBUG}


def rank() -> int:
    """Returns the global rank: from the process group, else from the launcher; 0 for a single process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    # RANK alone may be the user's own variable, such as the rank of an adapter.
    announced, processes = launcher_number("RANK"), launcher_number("WORLD_SIZE")
    return announced if announced is not None and processes is not None and announced < processes else 0


def launcher_number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the number in a launcher's environment variable; None if it is unset or no number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


class _BarSafeHandler(logging.Handler):
    """Writes above tqdm's bars: a plain write to the stream breaks the Trainer's progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def _is_shown(record: logging.LogRecord) -> bool:
    """True for records of rank 0; on every rank for records below `info` or of `log_from_any_rank`."""
    return rank() == 0 or record.levelno < logging.INFO or getattr(record, _ANY_RANK, False)


def get_logger() -> logging.Logger:
    """Returns the package's logger with its own handler; it does not propagate, which would print lines twice."""
    logger = logging.getLogger(LOGGER_NAME)
    if not any(isinstance(handler, _BarSafeHandler) for handler in logger.handlers):
        handler = _BarSafeHandler()
        handler.setFormatter(logging.Formatter("[memopt] %(message)s"))
        handler.addFilter(_is_shown)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def set_log_level(name: str) -> None:
    get_logger().setLevel(LOG_LEVELS[name])


def log_from_any_rank(line: str) -> None:
    """Log a warning from any rank, since only this one may have it."""
    get_logger().warning(line, extra={_ANY_RANK: True})


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """Suppress this thread's log lines below a warning, while something is tried that is not the user's run."""
    logger, thread = get_logger(), threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        # Progress lines come from another thread.
        return record.levelno >= logging.WARNING or record.thread != thread

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


@contextlib.contextmanager
def best_effort(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run reporting code that must not stop training: its errors become warnings, except for MemOptError.

    Args:
        what: subject of the warning, such as `a memory snapshot`.
        otherwise: called after an error.
    """
    try:
        yield
    except MemOptError:
        raise
    except Exception as error:
        get_logger().warning(f"{what} is left out ({line_of(error)}); training is not affected")
        otherwise()


_EVERY_SECONDS = 10.0


class Progress:
    """A running task.

    Attributes:
        stage: the current stage, such as `partitioning`, for the next log line.
        part: the progress of a nested task.
        done: text of the last log line, if the task has done something other than announced.
    """

    def __init__(self, stage: str = "") -> None:
        self.stage, self.done = stage, ""
        self.part: Progress | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.stage, str(self.part or ""))))


_current: ContextVar[Progress | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def watched(doing: str, stage: str = "", every: float = _EVERY_SECONDS) -> Iterator[Progress]:
    """Log a line every `every` seconds while a task runs; a nested task is shown in the lines of the outer one.

    The lines come from a thread, since neither torch's compilers nor engines' exporters report progress.

    Args:
        doing: name of the task, such as `predicting a training step`.
        stage: the first stage; the task sets the later ones.
    """
    progress, whole = Progress(stage), _current.get()
    if whole is not None:
        part = Progress(doing)
        part.part, before, whole.part = progress, whole.part, part
        try:
            yield progress
        finally:
            whole.part = before
        return
    is_over, begin, token = threading.Event(), time.monotonic(), _current.set(progress)

    def report() -> None:
        while not is_over.wait(every):
            now = ": ".join(filter(None, (doing, str(progress))))
            get_logger().info(f"still {now}, {time.monotonic() - begin:.0f} s so far")

    reporter = threading.Thread(target=report, name="memopt progress", daemon=True)
    reporter.start()
    try:
        yield progress
    finally:
        _current.reset(token)
        is_over.set()
        # No line of the thread may follow the task's last line.
        reporter.join()


@contextlib.contextmanager
def announced(
    doing: str, done: str, note: str = "", stage: str = "", every: float = _EVERY_SECONDS
) -> Iterator[Progress]:
    """Log a line when a task begins, a line every `every` seconds while it runs, and a line when it has ended.

    A task that raises has no last line.

    Args:
        doing: name of the task, such as `compiling the training graph of GPT2LMHeadModel`.
        done: the same in the past tense.
        note: appended to the first line: the parts of the task, or how often it runs.
        stage: the first stage; the task sets the later ones.
    """
    begin = time.monotonic()
    get_logger().info(f"{doing}{note and f': {note}'}")
    with watched(doing, stage, every) as progress:
        yield progress
    get_logger().info(f"{progress.done or done} in {time.monotonic() - begin:.1f} s")


class TimeIsUpError(Exception):
    """Raised if a task has no time left for its next part."""


class Deadline:
    """A time limit for a task, in seconds from its construction."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def check(self, needed: float = 0.0) -> None:
        """Raise TimeIsUpError if no time is left for a part that is expected to take `needed` seconds."""
        if self.elapsed + needed >= self.seconds:
            raise TimeIsUpError
