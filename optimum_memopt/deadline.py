"""The time that a task may take, which the task itself looks at."""

import time


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
