"""Checks the values of an options dataclass against its fields: their types, `choices` and `Numbers`."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from optimum_memopt.errors import MemOptError, excerpt, path_excerpt

_PATH = {os.PathLike, str, type(None)}
_PLURALS = {
    bool: "true and false",
    str: "strings",
    os.PathLike: "paths",
    list: "lists",
    tuple: "tuples",
    dict: "dicts",
}


def flag(default: Any, text: str, **metadata: Any) -> Any:
    """Returns a field of an options dataclass.

    Args:
        default: the field's default.
        text: its help.
        metadata: `choices`, if only some values are allowed, and other keyword arguments for argparse.
    """
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class Numbers:
    """The range of whole numbers that an option takes, both ends included: `Annotated[int, Numbers(1, 9)]`.

    Not part of the field's metadata, which HfArgumentParser passes on to argparse (transformers 5.23).

    Attributes:
        meaning: text for error messages, if the numbers alone say too little.
    """

    low: int = -(2**63)
    high: int = 2**63 - 1
    meaning: str = ""

    def __str__(self) -> str:
        if self.meaning:
            return self.meaning
        low = f" from {self.low}" if self.low > -(2**63) else ""
        high = f" to {self.high}" if self.high < 2**63 - 1 else " up" if low else ""
        return f"whole numbers{low}{high}"


def check(options: Any, kind: type) -> None:
    """Check the fields of the dataclass `kind` in `options`, an instance of it or of a subclass.

    Converts paths to strings and other libraries' integers to Python's, so that the options stay serialisable.

    Raises:
        MemOptError: a value is wrong; names the first such option, its value, and what is allowed.
    """
    # Not `field.type`, which HfArgumentParser overwrites.
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = getattr(options, field.name)
        choices = field.metadata.get("choices")
        setattr(options, field.name, checked(f"--{field.name}", value, hints[field.name], choices))


def check_written(flag: str, path: str) -> None:
    """Raise a MemOptError if a flag's output path is a folder, or lies in a folder that does not exist."""
    if not os.path.isdir(os.path.dirname(path) or os.curdir):
        raise MemOptError(f"{flag} {path_excerpt(path)}: no such folder; create it first")
    if os.path.isdir(path):
        raise MemOptError(f"{flag} {path_excerpt(path)}: is a folder; give a file in it")


def check_page(flag: str, path: str) -> None:
    """Raise a MemOptError if a page cannot be drawn or written."""
    check_written(flag, path)
    check_drawing(flag)


def check_drawing(flag: str, what: str = "the page", packages: Sequence[str] = ("matplotlib", "jinja2")) -> None:
    """Raise a MemOptError if a package needed to draw `what` is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise MemOptError(f"{flag}: {what} needs {' and '.join(missing)}: pip install optimum-memopt[report]")


def checked(name: str, value: Any, hint: Any, choices: Sequence[str] | None = None) -> Any:
    """Returns a checked value, with a path and a number for a string as a string, and another library's integer as
    Python's.

    Args:
        name: the name of the option or parameter, for the error.
        hint: the annotation of the option or parameter.
        choices: the allowed values; None: all values of the type.

    Raises:
        MemOptError: the value has another type, or is not among the choices or `Numbers`.
    """
    hint, numbers = without_numbers(hint)
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = {get_origin(kind) or kind for kind in (get_args(hint) if is_union else (hint,))}
    allowed = ", ".join(choices) if choices else str(numbers) if int in kinds else _listed(kinds)
    if kinds <= {str, type(None)} and _is_a(value, float):
        # Its parser says what is missing, such as a unit.
        value = excerpt(value)
    if not any(_is_a(value, kind) for kind in kinds):
        shown = f"'{excerpt(value)}'" if isinstance(value, str) else excerpt(value)
        raise MemOptError(f"{name} {shown}: allowed: {allowed}")
    if isinstance(value, os.PathLike):
        value = os.fsdecode(value)
    elif _is_a(value, int):
        value = int(value)
    is_allowed = value is None or (
        (not _is_a(value, int) or numbers.low <= value <= numbers.high)
        and (not choices or value in choices)
        and (kinds != _PATH or (bool(value) and "\0" not in value))
    )
    if not is_allowed:
        raise MemOptError(f"{name} {excerpt(value) or repr(value)}: allowed: {allowed}")
    return value


def without_numbers(hint: Any) -> tuple[Any, Numbers]:
    """Returns the type in an annotation, and its range of numbers."""
    return get_args(hint) if get_origin(hint) is Annotated else (hint, Numbers())


def _is_a(value: Any, kind: type) -> bool:
    """Returns `isinstance`, but a bool is no number, and other libraries' numbers are."""
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _listed(kinds: set[type]) -> str:
    *others, last = sorted(_PLURALS.get(kind, kind.__name__) for kind in kinds - {type(None)})
    return f"{', '.join(others)} and {last}" if others else last
