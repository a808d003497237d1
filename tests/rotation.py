"""Nightly tests (tests/nightly and matrix cells); `make test` runs a share of them, a different one per commit."""

import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Each commit runs one of 24 files with such tests: tests closer to the user find most of their failures.
TURNS = 24
in_turn = pytest.mark.nightly(shares=TURNS)


def nightly(values: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`, all nightly except `but`.

    Args:
        values: one value per test, or a tuple of several arguments.
        but: values, first arguments or function names that every run includes.
    """
    return [
        pytest.param(*_arguments(value), marks=[] if _is_in(value, but) else [pytest.mark.nightly]) for value in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_in(value: Any, names: Collection[Any]) -> bool:
    first, function = _arguments(value)[0], getattr(value, "__name__", None)
    return value in names or first in names or (function is not None and function in names)


class Share:
    """One of N equal shares of the nightly tests, by the hashes of their names."""

    def __init__(self, text: str):
        """
        Args:
            text: `K/N` for the tests whose hash is K modulo N, for any K; `all` is 0/1.
        """
        which, _, parts = ("0/1" if text == "all" else text).partition("/")
        self.which, self.parts = int(which), int(parts)

    def has(self, item: pytest.Item) -> bool:
        """True if a test is not nightly or falls into this share; all rotating tests of a file share one turn."""
        marks = list(item.iter_markers("nightly"))
        if not marks:
            return True
        if all("shares" in mark.kwargs for mark in marks):
            parts = min(self.parts, *(mark.kwargs["shares"] for mark in marks))
            return self._is_at(item.nodeid.partition("::")[0], parts)
        return self._is_at(item.nodeid, self.parts)

    def _is_at(self, name: str, parts: int) -> bool:
        return (zlib.crc32(name.encode()) - self.which) % parts == 0
