"""Parses the plan grammar: `cluster_id:strategy:count, …`, inline or as a JSON list of such strings.

    config     = request { "," request }
    request    = cluster_id ":" strategy ":" count
    cluster_id = ONNX operator names, each followed by "+": `Gelu+`, `FusedMatMul+Add+`

This is ONNX Runtime Training's own grammar (docs/Memory_Optimizer.md in its repository), parsed strictly: ORT ignores
text that it does not understand; here every mistake is an error with its column.
"""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from optimum_memopt.errors import MemOptError, excerpt, path_excerpt
from optimum_memopt.plans.plan_file import read_json

ALL = -1


class Strategy(IntEnum):
    """The treatment of a saved activation."""

    NONE = 0
    RECOMPUTE = 1
    RECOMPUTE_WITH_COMPROMISE = 2
    OFFLOAD = 3
    COMPRESS = 4


_CLUSTER_ID = re.compile(r"(?:[A-Za-z_]\w*\+)+", re.ASCII)
# Nine digits: Python does not parse integers of more than 4,300 digits, and no graph has a billion occurrences.
_INTEGER = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_LARGEST_FILE = 2**20
_SHAPE = "cluster_id:strategy:count, for example Gelu+:1:-1"
_FILE_SHAPE = 'expected a JSON list of strings such as ["Gelu+:1:-1"]'
_STRATEGIES = (
    "0 (none), 1 (recompute), 2 (recompute with compromised saving), 3 (offload to host) or 4 (compress to fp8, "
    "inexact)"
)


class ConfigError(MemOptError):
    """An invalid memory-optimizer config; the message says where it is wrong and what is allowed there."""


@dataclass(frozen=True)
class PlanRequest:
    """One `cluster_id:strategy:count`; `count` is -1 for all occurrences and 0 for none."""

    cluster_id: str
    strategy: Strategy
    count: int

    def __str__(self) -> str:
        return f"{self.cluster_id}:{int(self.strategy)}:{self.count}"

    @property
    def is_on(self) -> bool:
        return self.strategy is not Strategy.NONE and self.count != 0


@dataclass(frozen=True)
class PlanConfig:
    """A user's requests in their order, each cluster id once."""

    requests: tuple[PlanRequest, ...]

    def __str__(self) -> str:
        return ",".join(str(request) for request in self.requests)

    def to_json(self) -> str:
        """Returns the text of a JSON file that both `load` and ONNX Runtime 1.19 read."""
        return json.dumps([str(request) for request in self.requests])

    @classmethod
    def load(cls, source: "ConfigSource") -> "PlanConfig":
        """Read a config in any of the forms of `to_text`.

        Raises:
            ConfigError: unreadable file, bad syntax, or a duplicate cluster id.
        """
        text = to_text(source)
        return parse_file(Path(text)) if _is_path(text) else parse(text)


# The forms that `to_text` accepts. HfArgumentParser parses a flag as the second type of a union, so that must be str
# (transformers 5.23).
ConfigSource = os.PathLike[str] | str | list[str] | tuple[str, ...] | dict[str, int | str] | PlanConfig


def to_text(source: ConfigSource) -> str:
    """Returns a config as the flag's text; for a file, its path (the file is not read).

    Args:
        source: the text itself, a config or the path of a JSON list of strings; a list of `cluster_id:strategy:count`;
            a dict of cluster id to strategy (`{"Gelu+": 1}`, all occurrences) or to `strategy:count`
            (`{"Gelu+": "1:4"}`); a `Path`; a `PlanConfig`.

    Raises:
        ConfigError: `source` has another type, or is an empty list or dict.
    """
    if isinstance(source, str | PlanConfig):
        return str(source)
    if isinstance(source, os.PathLike):
        return _path_text(os.fsdecode(source))
    if not isinstance(source, dict | list | tuple):
        raise ConfigError(
            f"memory-optimizer config {excerpt(source)}: allowed: a string, a list of strings, a dict of cluster "
            "id to strategy, or a path"
        )
    if not source:
        raise ConfigError(f"memory-optimizer config: the {type(source).__name__} is empty; expected {_SHAPE}")
    items = [_entry(*pair) for pair in source.items()] if isinstance(source, dict) else source
    for number, item in enumerate(items, 1):
        if not isinstance(item, str):
            raise ConfigError(
                f'memory-optimizer config, item {number}: expected a string such as "Gelu+:1:-1", not {excerpt(item)}'
            )
    return ",".join(items)


def _entry(cluster_id: Any, plan: Any) -> str:
    if isinstance(cluster_id, str) and isinstance(plan, int) and not isinstance(plan, bool):
        return f"{cluster_id}:{excerpt(int(plan))}:{ALL}"
    if isinstance(cluster_id, str) and isinstance(plan, str):
        return f"{cluster_id}:{plan}"
    raise ConfigError(
        f"memory-optimizer config, {excerpt(cluster_id)}: {excerpt(plan)}: expected a cluster id and its strategy, "
        'for example {"Gelu+": 1} or {"Gelu+": "1:-1"}'
    )


def _path_text(path: str) -> str:
    """Returns the path, spelled so that `_is_path` recognizes it."""
    text = path if _is_path(path) else os.path.join(os.curdir, path)
    if not _is_path(text):
        raise ConfigError(
            f'memory-optimizer config file {path_excerpt(path)}: with ":" in it, its name must end in .json'
        )
    return text


def _is_path(text: str) -> bool:
    return text.endswith(".json") or (":" not in text and ("/" in text or os.path.isfile(text)))


def parse(text: str) -> PlanConfig:
    """Parse a config; columns in errors start at 1.

    Raises:
        ConfigError: bad syntax, or a duplicate cluster id.
    """
    return _unique(_requests(text, ""))


def parse_file(path: Path) -> PlanConfig:
    """Read a JSON list of config strings (ONNX Runtime 1.19's own format).

    Raises:
        ConfigError: no such file, not JSON, not a list of strings, bad syntax, or a duplicate cluster id.
    """
    shown = path_excerpt(path)
    try:
        items = read_json(path, "memory-optimizer config", _FILE_SHAPE, _LARGEST_FILE)
    except MemOptError as error:
        raise ConfigError(str(error)) from None
    if isinstance(items, dict) and "format" in items:
        raise ConfigError(f"memory-optimizer config {shown}: a plan file; give it to --memory_opt_plan")
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"memory-optimizer config {shown}: {_FILE_SHAPE}")
    if not items:
        raise ConfigError(f"memory-optimizer config {shown}: the list is empty; expected {_SHAPE}")
    located = (_requests(item, f"{shown}, string {number}, ") for number, item in enumerate(items, 1))
    return _unique(itertools.chain.from_iterable(located))


def _requests(text: str, source: str) -> Iterator[tuple[PlanRequest, str]]:
    """Yields each request with its position, for errors."""
    start = 0
    for piece in text.split(","):
        begin = start + len(piece) - len(piece.lstrip())
        yield _request(piece.strip(), begin, text, source), f"{source}column {begin + 1}"
        start += len(piece) + 1


def _request(piece: str, begin: int, text: str, source: str) -> PlanRequest:
    def fail(offset: int, what: str) -> ConfigError:
        at = begin + offset
        return ConfigError(
            f'memory-optimizer config, {source}column {at + 1}: {what}, in "{excerpt(text, around=at)}"'
        )

    if not piece:
        raise fail(0, f"empty item; expected {_SHAPE}")
    fields = piece.split(":")
    if len(fields) != 3:
        count = f"{len(fields)} field{'s' * (len(fields) > 1)}"
        raise fail(0, f'"{excerpt(piece)}" has {count} instead of 3; expected {_SHAPE}')
    cluster_id, strategy, count = fields
    strategy_at = len(cluster_id) + 1
    count_at = strategy_at + len(strategy) + 1
    matched = _CLUSTER_ID.match(cluster_id)
    valid = matched.end() if matched else 0
    if not valid or valid != len(cluster_id):
        hint = f'; did you mean "{excerpt(cluster_id + "+")}"?' if _CLUSTER_ID.fullmatch(f"{cluster_id}+") else ""
        shown = excerpt(cluster_id, around=valid)
        raise fail(valid, f'"{shown}" is not a cluster id: operator names, each followed by "+"{hint}')
    if strategy not in {str(int(strategy)) for strategy in Strategy}:
        raise fail(strategy_at, f'strategy "{excerpt(strategy)}" is not one of {_STRATEGIES}')
    if not _INTEGER.fullmatch(count) or int(count) < ALL:
        raise fail(count_at, f'count "{excerpt(count)}" is not -1 (all), 0 (off) or a number of occurrences')
    return PlanRequest(cluster_id, Strategy(int(strategy)), int(count))


def _unique(located: Iterable[tuple[PlanRequest, str]]) -> PlanConfig:
    first: dict[str, tuple[PlanRequest, str]] = {}
    for request, place in located:
        if request.cluster_id in first:
            earlier, earlier_place = first[request.cluster_id]
            problem = "is a duplicate of" if earlier == request else "contradicts"
            raise ConfigError(
                f"memory-optimizer config, {place}: {excerpt(str(request))} {problem} {excerpt(str(earlier))} at "
                f"{earlier_place}"
            )
        first[request.cluster_id] = request, place
    return PlanConfig(tuple(request for request, _ in first.values()))
