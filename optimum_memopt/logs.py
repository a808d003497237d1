"""The package's log: one logger, rank 0 only, written without breaking progress bars; and lines of long tasks."""

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
    """The global rank of this process: that of its process group, else the launcher's; 0 without several processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    # RANK alone may be a variable of the user's, such as the rank of an adapter.
    announced, processes = launcher_number("RANK"), launcher_number("WORLD_SIZE")
    return announced if announced is not None and processes is not None and announced < processes else 0


def launcher_number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """The number that a launcher tells its processes in a variable; None: there is none."""
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
    """True for records of rank 0; those below `info` (devinfo, verbose), and of `log_from_any_rank`, of every rank."""
    return rank() == 0 or record.levelno < logging.INFO or getattr(record, _ANY_RANK, False)


def get_logger() -> logging.Logger:
    """The package's logger with its own handler; it does not propagate, which would print lines twice."""
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
    """A warning that only this rank may have."""
    get_logger().warning(line, extra={_ANY_RANK: True})


@contextlib.contextmanager
def only_warnings() -> Iterator[None]:
    """No lines below a warning, while something is tried that is not the user's run."""
    logger, thread = get_logger(), threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        # Progress is told by a thread of its own.
        return record.levelno >= logging.WARNING or record.thread != thread

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


@contextlib.contextmanager
def best_effort(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Run reporting code that must not stop training: its errors, other than the user's own mistakes, become warnings.

    Args:
        what: subject of the warning, as `a memory snapshot`.
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
        stage: what it does now, as `partitioning`, for the next log line.
        part: a task within it that has a progress of its own.
        done: for the last log line, where it has done something else than was announced.
    """

    def __init__(self, stage: str = "") -> None:
        self.stage, self.done = stage, ""
        self.part: Progress | None = None

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.stage, str(self.part or ""))))


_current: ContextVar[Progress | None] = ContextVar("current", default=None)


@contextlib.contextmanager
def watched(doing: str, stage: str = "", every: float = _EVERY_SECONDS) -> Iterator[Progress]:
    """Log a line every `every` seconds while a task runs; within another task it is a part of that one's lines.

    The lines come from a thread, since neither torch's compilers nor engines' exporters report progress.

    Args:
        doing: `predicting a training step`.
        stage: the first one; the task sets those that follow.
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
        # No line of the thread may follow the task's last one.
        reporter.join()


@contextlib.contextmanager
def announced(
    doing: str, done: str, note: str = "", stage: str = "", every: float = _EVERY_SECONDS
) -> Iterator[Progress]:
    """Log one line when a task begins, one every `every` seconds while it runs, and one when it has ended.

    A task that raises has no last line.

    Args:
        doing: `compiling the training graph of GPT2LMHeadModel`; `done` is the same in the past tense.
        note: appended to the first line: what the task consists of, how often it runs.
        stage: the first one; the task sets those that follow.
    """
    begin = time.monotonic()
    get_logger().info(f"{doing}{note and f': {note}'}")
    with watched(doing, stage, every) as progress:
        yield progress
    get_logger().info(f"{progress.done or done} in {time.monotonic() - begin:.1f} s")


class TimeIsUpError(Exception):
    """A task has no time left for its next part."""


class Deadline:
    """The seconds that a task may take, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def check(self, needed: float = 0.0) -> None:
        """Raise TimeIsUpError before a part of the task that takes more seconds than are left, as far as is known."""
        if self.elapsed + needed >= self.seconds:
            raise TimeIsUpError
