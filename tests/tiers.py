"""Which tests `make check` and `make test` take; `docs/testing.md` has the tiers."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Folders whose tests train through an engine, a Trainer, a launcher or a command: not in `make check`, which does not
# even import them. In the others single tests have the mark.
END_TO_END = ("ort/", "train/")


def is_end_to_end(path: str) -> bool:
    """Whether a test file, by its path below this folder, is no unit test."""
    return path.startswith(END_TO_END)


def tiered(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `make test` runs the `fast` ones, `make test-all` all of them.

    Args:
        values: one a test, or a tuple of several arguments.
        fast: those of the values, first arguments or names of functions among them, that are not slow.
    """
    return [
        pytest.param(*_arguments(value), marks=[] if _is_in(value, fast) else [pytest.mark.slow]) for value in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_in(value: Any, fast: Collection[Any]) -> bool:
    first = value[0] if isinstance(value, tuple) else value
    return value in fast or first in fast or getattr(value, "__name__", None) in fast
