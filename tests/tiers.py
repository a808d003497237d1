"""Which parameters of a test `make test` takes; `docs/testing.md` has the tiers."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `make test` runs the `fast` ones, `make test-all` all of them.

    Args:
        values: one a test, or a tuple of several arguments.
        fast: those of the values, or names of functions among them, that are not slow.
    """
    return [
        pytest.param(*_arguments(value), marks=[] if _is_in(value, fast) else [pytest.mark.slow]) for value in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_in(value: Any, fast: Collection[Any]) -> bool:
    return value in fast or getattr(value, "__name__", None) in fast
