"""Long tasks: lines while one runs, and the time that one may take."""

import contextlib
import threading
import time
from collections.abc import Iterator

from optimum_memopt.logs import get_logger

_EVERY_SECONDS = 10.0


class Progress:
    """The state of a running task.

    Attributes:
        stage: what the task is doing, as `partitioning`, for the next log line; empty: unknown.
    """

    def __init__(self, stage: str = "") -> None:
        self.stage = stage


@contextlib.contextmanager
def announced(
    doing: str, done: str, note: str = "", stage: str = "", every: float = _EVERY_SECONDS
) -> Iterator[Progress]:
    """Log one line when a task begins, one every `every` seconds while it runs, and one when it has ended.

    The lines in between come from a thread, since neither torch's compilers nor engines' exporters report progress. A
    task that raises has no last line.

    Args:
        doing: `compiling the training graph of GPT2LMHeadModel`.
        done: the same in the past tense.
        note: appended to the first line: what the task consists of, how often it runs.
        stage: the initial one, see `Progress`.
        every: interval in seconds.

    Yields:
        Progress: for the task to set its stage.
    """
    progress, is_over, begin = Progress(stage), threading.Event(), time.monotonic()

    def report() -> None:
        while not is_over.wait(every):
            stage = f": {progress.stage}" if progress.stage else ""
            get_logger().info(f"still {doing}{stage}, {time.monotonic() - begin:.0f} s so far")

    get_logger().info(f"{doing}{note and f': {note}'}")
    reporter = threading.Thread(target=report, name="memopt progress", daemon=True)
    reporter.start()
    try:
        yield progress
    finally:
        is_over.set()
        # No line of the thread may follow the last one.
        reporter.join()
    get_logger().info(f"{done} in {time.monotonic() - begin:.1f} s")


class TimeIsUpError(Exception):
    """A task has no time left for its next part."""


class Deadline:
    """Begins when it is made.

    Args:
        seconds: that a task may take.

    Attributes:
        seconds: see above.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begin

    def check(self, needed: float = 0.0) -> None:
        """To be called before each part of the task.

        Args:
            needed: seconds that the part will take, as far as it is known.

        Raises:
            TimeIsUpError: there is less time left.
        """
        if self.elapsed + needed >= self.seconds:
            raise TimeIsUpError
