"""Nightly tests, those of tests/nightly and cells of a matrix: `make test` takes a share, another with each commit."""

import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly(values: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """Parameters for `pytest.mark.parametrize` that are nightly, `but` for some.

    Args:
        values: one a test, or a tuple of several arguments.
        but: those of the values, first arguments or names of functions among them, that each run takes.
    """
    return [
        pytest.param(*_arguments(value), marks=[] if _is_in(value, but) else [pytest.mark.nightly]) for value in values
    ]


def _arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_in(value: Any, names: Collection[Any]) -> bool:
    first = _arguments(value)[0]
    return value in names or first in names or getattr(value, "__name__", None) in names


class Share:
    """One of so many equal parts of the nightly tests, by the hashes of their names."""

    def __init__(self, text: str):
        """
        Args:
            text: `K/N` for the tests whose hash is K modulo N, whatever K is; `all` is 0/1.
        """
        which, _, parts = ("0/1" if text == "all" else text).partition("/")
        self.which, self.parts = int(which), int(parts)

    def has(self, name: str) -> bool:
        return (zlib.crc32(name.encode()) - self.which) % self.parts == 0
