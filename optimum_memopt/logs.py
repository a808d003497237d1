"""The package's log: one logger, rank 0 only, written without breaking progress bars."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from tqdm.auto import tqdm

from optimum_memopt.errors import MemOptError

LOGGER_NAME = "optimum_memopt"
_ANY_RANK = "is_of_any_rank"

# Names as in ONNX Runtime (onnxruntime/training/ortmodule/options.py, LogLevel): `devinfo` is between info and verbose
# and the first level at which every rank logs.
LOG_LEVELS = {
    "warning": logging.WARNING,
    "info": logging.INFO,
    "devinfo": logging.INFO - 5,
    "verbose": logging.DEBUG,
}


def rank() -> int:
    """The global rank of this process, 0 without distributed training."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class _BarSafeHandler(logging.Handler):
    """Writes above tqdm's bars: a plain write to the stream breaks the Trainer's progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


class _RankFilter(logging.Filter):
    """Passes records of rank 0; those below `info` (devinfo, verbose), and of `log_from_any_rank`, of every rank."""

    def filter(self, record: logging.LogRecord) -> bool:
        return rank() == 0 or record.levelno < logging.INFO or getattr(record, _ANY_RANK, False)


def get_logger() -> logging.Logger:
    """The package's logger with its own handler; it does not propagate, which would print lines twice."""
    logger = logging.getLogger(LOGGER_NAME)
    if not any(isinstance(handler, _BarSafeHandler) for handler in logger.handlers):
        handler = _BarSafeHandler()
        handler.setFormatter(logging.Formatter("[memopt] %(message)s"))
        handler.addFilter(_RankFilter())
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def set_log_level(name: str) -> None:
    """Set the level by name, a key of `LOG_LEVELS`."""
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
    """Run reporting code that must not stop training: its errors become warnings.

    Args:
        what: subject of the warning, as `a memory snapshot`.
        otherwise: called after an error.

    Raises:
        MemOptError: the error is a mistake of the user's.
    """
    try:
        yield
    except MemOptError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        get_logger().warning(f"{what} is left out ({type(error).__name__}: {reason}); training is not affected")
        otherwise()
