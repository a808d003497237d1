"""Says in the log that a long task has begun, where it is while it runs, and how many seconds it took."""

import contextlib
import threading
import time
from collections.abc import Iterator

from optimum_memopt.logs import get_logger

_EVERY_SECONDS = 10.0


class Progress:
    """A long task as it runs.

    Attributes:
        stage: what it does now, as `partitioning`; the next line shows it. Empty: unknown.
    """

    def __init__(self, stage: str = "") -> None:
        self.stage = stage


@contextlib.contextmanager
def announced(
    doing: str, done: str, note: str = "", stage: str = "", every: float = _EVERY_SECONDS
) -> Iterator[Progress]:
    """Log one line when a task begins, one every `every` seconds while it runs, and one when it is over.

    The lines in between come from a thread, since neither torch's compilers nor ONNX Runtime's exporter report
    progress. A task that raises has no last line: its error says more.

    Args:
        doing: `compiling the training graph of GPT2LMHeadModel`.
        done: the same in the past tense.
        note: follows `doing` in the first line: what the task consists of, how often it comes.
        stage: the first one, see `Progress`.
        every: in seconds.

    Yields:
        Progress: where the task notes its stage.
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
        # A line of its own after the last one would be about a task that is over.
        reporter.join()
    get_logger().info(f"{done} in {time.monotonic() - begin:.1f} s")
