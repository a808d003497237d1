"""The package's log: one logger, rank 0 only, and written around a progress bar instead of through it."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

import torch
from tqdm.auto import tqdm

from optimum_memopt.errors import MemOptError

LOGGER_NAME = "optimum_memopt"

# ONNX Runtime's own names and their meaning (onnxruntime/training/ortmodule/options.py, LogLevel): `devinfo` stands
# between info and verbose and is the first level at which every rank speaks.
LOG_LEVELS = {
    "warning": logging.WARNING,
    "info": logging.INFO,
    "devinfo": logging.INFO - 5,
    "verbose": logging.DEBUG,
}


def rank() -> int:
    """This process's rank among all processes of the run, 0 when there is only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


class _BarSafeHandler(logging.Handler):
    """Writes above tqdm's bars: a plain write to the stream tears the Trainer's progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


class _RankFilter(logging.Filter):
    """Lets rank 0 speak; below `info` (devinfo, verbose) every rank does, as in ONNX Runtime."""

    def filter(self, record: logging.LogRecord) -> bool:
        return rank() == 0 or record.levelno < logging.INFO


def get_logger() -> logging.Logger:
    """The package's logger, with its own handler in place; it does not propagate, or lines would come twice."""
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
    """Set the level by one of ORT's names (a key of `LOG_LEVELS`)."""
    get_logger().setLevel(LOG_LEVELS[name])


@contextlib.contextmanager
def informing(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Around code that says something about training and must not end it: an error there is a warning.

    Args:
        what: that is left out then.
        otherwise: called then.

    Raises:
        MemOptError: a mistake of the user's, found on the way.
    """
    try:
        yield
    except MemOptError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        get_logger().warning(f"{what} is left out ({type(error).__name__}: {reason}); training is not affected")
        otherwise()
