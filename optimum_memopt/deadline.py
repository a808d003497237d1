"""Ends a task when its time is up, wherever it is then."""

import ctypes
import threading
from collections.abc import Callable

# Seconds after which a task is told again: an error in a callback of the garbage collector's is dropped by Python.
_AGAIN = 0.5


class TimeIsUpError(BaseException):
    """As a KeyboardInterrupt no error: `except Exception` lets it pass."""


def finished_within(seconds: float, task: Callable[[], None]) -> bool:
    """Run a task in this thread; False where it has not come to its end in time.

    It is ended as Ctrl-C would end it, also in a tracer or a solver that asks nobody for the time: by an error that
    another thread raises in this one (`PyThreadState_SetAsyncExc`), between two of Python's instructions. A call of
    native code is waited for.

    Args:
        seconds: that it may take.
        task: what it has found by then is where it has put it.
    """
    timer = _Timer(seconds)
    try:
        try:
            task()
        finally:
            timer.stop()
    except TimeIsUpError:
        timer.stop()
        return False
    return True


class _Timer:
    """Raises `TimeIsUpError` in the thread that made it, until it is stopped."""

    def __init__(self, seconds: float) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock, self._is_over = threading.Lock(), threading.Event()
        threading.Thread(target=self._wait, args=(seconds,), name="memopt deadline", daemon=True).start()

    def stop(self) -> None:
        """Nothing is raised from now on, nor what was already and has not arrived."""
        with self._lock:
            self._is_over.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, None)

    def _wait(self, seconds: float) -> None:
        while not self._is_over.wait(seconds):
            seconds = _AGAIN
            with self._lock:
                if not self._is_over.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(TimeIsUpError))
