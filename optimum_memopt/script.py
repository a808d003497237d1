"""Ends a script on a user's mistake with one line instead of a traceback."""

import sys
from collections.abc import Callable
from typing import TypeVar

from optimum_memopt.errors import MemOptError

Result = TypeVar("Result")


def run(main: Callable[[], Result]) -> Result:
    """Run a script's `main`: a `MemOptError` ends it in one line on stderr and exit code 2, without a traceback.

    Every other exception is raised as ever.

    Returns:
        What `main` returns.

    Raises:
        SystemExit: `main` ended in a `MemOptError`, which is its cause.
    """
    try:
        return main()
    except MemOptError as error:
        _close_progress_bars()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _close_progress_bars() -> None:
    """A bar that is still open would be drawn once more at exit, over and after the error."""
    from tqdm.auto import tqdm

    # tqdm's own list (4.64 to 4.67); there before the first bar is, except under other kinds of bars.
    for bar in tuple(getattr(tqdm, "_instances", ())):
        bar.leave = False
        bar.close()
