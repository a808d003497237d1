"""Which parameters of a model train, by patterns of their names."""

import bisect
import difflib
import fnmatch
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from optimum_memopt.errors import MemOptError, excerpt

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
# Letters of the names that an error shows.
_SHOWN = 150


def freeze_others(model: "torch.nn.Module", patterns: Sequence[str]) -> None:
    """Let only the parameters train that a pattern matches; without patterns nothing is changed.

    Args:
        model: whose parameters are frozen.
        patterns: see `matches`.

    Raises:
        MemOptError: a pattern that matches nothing, with names that there are.
    """
    if not patterns:
        return
    # A tied parameter has several names.
    named = list(model.named_parameters(remove_duplicate=False))
    trained = set()
    for pattern in patterns:
        found = {id(parameter) for name, parameter in named if matches(pattern, name)}
        if not found:
            raise MemOptError(_nothing(pattern, type(model).__name__, [name for name, _ in named]))
        trained |= found
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in trained)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is that of a parameter.

    Args:
        pattern: as PEFT's `target_modules`, one or more parts of the name next to each other, as `query` or
            `attention.self.query`; or a glob or a regular expression for the whole name.
        name: `roberta.encoder.layer.0.attention.self.query.weight`.
    """
    if f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def _nothing(pattern: str, model: str, names: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(_NUMBER.sub(".*", name) for name in names))
    parts = dict.fromkeys(part for kind in kinds for part in kind.split("."))
    near = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    ends = list(itertools.accumulate(len(kind) + 2 for kind in kinds))
    shown = kinds[: max(1, bisect.bisect(ends, _SHOWN))]
    more = ", …" if len(shown) < len(kinds) else ""
    return (
        f"--trainable {excerpt(pattern) or repr(pattern)}: no parameter of {model} has this name; {hint}Available: "
        f"{', '.join(shown)}{more}"
    )
