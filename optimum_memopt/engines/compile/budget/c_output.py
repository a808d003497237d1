"""Keeps what a library in C prints out of this process's standard output."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

# A second thread would take the first one's `os.devnull` for the output to restore.
_LOCK = threading.RLock()


@contextlib.contextmanager
def without_c_output() -> Iterator[None]:
    """Drop what is written to descriptor 1 meanwhile, by other threads too; elsewhere than on Linux and macOS nothing.

    One thread at a time; a second one waits.

    HiGHS prints a line for some programs whatever it is told about its log (`printf` in
    `HighsMipSolverData::transformNewIntegerFeasibleSolution`, in scipy 1.17), which would break JSON and tables.
    """
    with _LOCK, _redirected():
        yield


@contextlib.contextmanager
def _redirected() -> Iterator[None]:
    kept = None
    if sys.platform != "win32":
        # Standard output may be closed.
        with contextlib.suppress(OSError):
            kept = os.dup(1)
    if kept is None:
        yield
        return
    buffers = ctypes.CDLL(None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        sys.stdout.flush()
        buffers.fflush(None)
        os.dup2(nowhere, 1)
        yield
    finally:
        buffers.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
