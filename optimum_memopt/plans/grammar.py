"""The plan grammar: `cluster_id:strategy:count, …`, inline or as a JSON list of such strings.

    config     = request { "," request }
    request    = cluster_id ":" strategy ":" count
    cluster_id = ONNX operator names, each followed by "+": `Gelu+`, `FusedMatMul+Add+`

It is ONNX Runtime Training's own grammar (docs/Memory_Optimizer.md in its repository), read strictly: ORT passes over
what it does not understand, here every mistake is an error that points at its column.
"""

import json
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from optimum_memopt.errors import MemOptError

ALL = -1


class Strategy(IntEnum):
    """What to do with a stashed activation."""

    NONE = 0
    RECOMPUTE = 1
    RECOMPUTE_WITH_COMPROMISE = 2
    OFFLOAD = 3


_CLUSTER_ID = re.compile(r"(?:[A-Za-z_]\w*\+)+", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_SHAPE = "cluster_id:strategy:count, for example Gelu+:1:-1"
_STRATEGIES = "0 (none), 1 (recompute), 2 (recompute with compromised saving) or 3 (offload to host)"


class ConfigError(MemOptError):
    """A memory-optimizer config that cannot be read; the message names the place and what is allowed there."""


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
    """What a user asked for, in the order of asking, each cluster id once."""

    requests: tuple[PlanRequest, ...]

    def __str__(self) -> str:
        return ",".join(str(request) for request in self.requests)

    def to_json(self) -> str:
        """The text of a JSON file that both `load` and ONNX Runtime 1.19 read."""
        return json.dumps([str(request) for request in self.requests])

    @classmethod
    def load(cls, text: str) -> "PlanConfig":
        """Read a config given inline or as the path of a JSON list of strings.

        Raises:
            ConfigError: unreadable file, bad syntax, or a cluster id that is asked for twice.
        """
        return parse_file(Path(text)) if _is_path(text) else parse(text)


def _is_path(text: str) -> bool:
    return text.endswith(".json") or ":" not in text and ("/" in text or Path(text).is_file())


def parse(text: str) -> PlanConfig:
    """Read an inline config; columns in errors count from 1.

    Raises:
        ConfigError: bad syntax, or a cluster id that is asked for twice.
    """
    return PlanConfig(_unique(_requests(text, "")))


def parse_file(path: Path) -> PlanConfig:
    """Read a JSON list of config strings (ONNX Runtime 1.19's own format).

    Raises:
        ConfigError: no such file, not JSON, not a list of strings, bad syntax, or a cluster id asked for twice.
    """
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"memory-optimizer config {path}: not JSON, line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"memory-optimizer config file {path}: {reason}") from None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f'memory-optimizer config {path}: expected a JSON list of strings such as ["Gelu+:1:-1"]')
    if not items:
        raise ConfigError(f"memory-optimizer config {path}: the list is empty; expected {_SHAPE}")
    found = [
        request for number, item in enumerate(items, 1) for request in _requests(item, f"{path}, string {number}, ")
    ]
    return PlanConfig(_unique(found))


@dataclass(frozen=True)
class _Located:
    request: PlanRequest
    place: str


def _requests(text: str, source: str) -> list[_Located]:
    located, start = [], 0
    for piece in text.split(","):
        begin = start + len(piece) - len(piece.lstrip())
        located.append(_Located(_request(piece.strip(), begin, text, source), f"{source}column {begin + 1}"))
        start += len(piece) + 1
    return located


def _request(piece: str, begin: int, text: str, source: str) -> PlanRequest:
    def fail(offset: int, what: str) -> ConfigError:
        return ConfigError(f'memory-optimizer config, {source}column {begin + offset + 1}: {what}, in "{text}"')

    if not piece:
        raise fail(0, f"nothing here; expected {_SHAPE}")
    fields = piece.split(":")
    if len(fields) != 3:
        raise fail(0, f'"{piece}" has {len(fields)} field{"s" * (len(fields) > 1)} instead of 3; expected {_SHAPE}')
    cluster_id, strategy, count = fields
    strategy_at = len(cluster_id) + 1
    count_at = strategy_at + len(strategy) + 1
    matched = _CLUSTER_ID.match(cluster_id)
    if matched is None or matched.end() != len(cluster_id):
        offset = matched.end() if matched else 0
        hint = f'; did you mean "{cluster_id}+"?' if _CLUSTER_ID.fullmatch(f"{cluster_id}+") else ""
        raise fail(offset, f'"{cluster_id}" is not a cluster id: operator names, each followed by "+"{hint}')
    if not strategy.isascii() or not strategy.isdigit() or int(strategy) not in iter(Strategy):
        raise fail(strategy_at, f'strategy "{strategy}" is not one of {_STRATEGIES}')
    if not _INTEGER.fullmatch(count) or int(count) < ALL:
        raise fail(count_at, f'count "{count}" is not -1 (all), 0 (off) or a number of occurrences')
    return PlanRequest(cluster_id, Strategy(int(strategy)), int(count))


def _unique(found: list[_Located]) -> tuple[PlanRequest, ...]:
    first: dict[str, _Located] = {}
    for located in found:
        earlier = first.setdefault(located.request.cluster_id, located)
        if earlier is not located:
            problem = "is a duplicate of" if earlier.request == located.request else "contradicts"
            raise ConfigError(
                f"memory-optimizer config, {located.place}: {located.request} {problem} "
                f"{earlier.request} at {earlier.place}"
            )
    return tuple(located.request for located in found)
