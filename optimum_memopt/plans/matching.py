"""Matches a user's requests with the plans of a graph: other spellings of an activation, near matches. Pure.

The same activation has different cluster ids where ONNX Runtime fuses different operators: its CUDA provider fuses
bias and dropout operators that the CPU provider does not (onnxruntime 1.19.2,
core/optimizer/{bias_gelu_fusion,bias_softmax_fusion,bias_dropout_fusion,bitmask_dropout_replacement}.cc).
"""

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from optimum_memopt.errors import excerpt
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, PlanRequest

# A fused operator to the unfused operators of the same activation, nearest first; the last one produces it.
UNFUSED = {
    "BiasGelu": (("Gelu",), ("Add", "Gelu")),
    "BiasSoftmax": (("Softmax",), ("Add", "Softmax")),
    "BiasSoftmaxDropout": (("Softmax", "Dropout"), ("Add", "Softmax", "Dropout"), ("Dropout",)),
    "BitmaskDropout": (("Dropout",),),
    "BiasDropout": (("Add", "Dropout"), ("Dropout",), ("Add", "Dropout", "Add")),
    "BitmaskBiasDropout": (("Add", "Dropout"), ("Dropout",), ("Add", "Dropout", "Add")),
}


def operators(cluster_id: str) -> tuple[str, ...]:
    """`FusedMatMul+Add+` to its operator names."""
    return tuple(cluster_id.split("+")[:-1])


def is_fused(cluster_id: str) -> bool:
    """Whether the id contains an operator that only some providers fuse."""
    return any(operator in UNFUSED for operator in operators(cluster_id))


def unfused(cluster_id: str) -> tuple[str, ...]:
    """Ids of the same activation without provider-specific fusions, nearest first."""
    choices = [UNFUSED.get(operator, ((operator,),)) for operator in operators(cluster_id)]
    spelled = (itertools.chain.from_iterable(parts) for parts in itertools.product(*choices))
    return tuple("".join(f"{operator}+" for operator in parts) for parts in spelled)


def translate(cluster_id: str, existing: Collection[str]) -> str | None:
    """The existing id of the same activation: itself, its unfused or its fused spelling; None without one."""
    if cluster_id in existing:
        return cluster_id
    fused = [other for other in existing if is_fused(other) and cluster_id in unfused(other)]
    nearest = min(fused, key=lambda other: (unfused(other).index(cluster_id), other), default=None)
    return next((other for other in unfused(cluster_id) if other in existing), nearest)


@dataclass(frozen=True)
class Match:
    """A request that is on, with the matching plan of the graph."""

    request: PlanRequest
    cluster_id: str

    @property
    def plan(self) -> str:
        return f"{self.cluster_id}:{int(self.request.strategy)}:{ALL}"

    @property
    def note(self) -> str:
        """Note for the plan's row of the table; empty if the id is spelled as in the request."""
        return "" if self.cluster_id == self.request.cluster_id else f"asked for as {self.request.cluster_id}"


@dataclass(frozen=True)
class Matches:
    """The matches of a config, each plan once, in the order of the requests; `remarks` are lines to log once."""

    on: tuple[Match, ...] = ()
    remarks: tuple[str, ...] = ()


def match(
    config: PlanConfig,
    existing: Iterable[str],
    strict: bool,
    here: str,
    translate: Callable[[str, Collection[str]], str | None] = translate,
) -> Matches:
    """Find the plan of each request.

    Args:
        existing: `cluster_id:strategy:-1` of every plan in the graph.
        strict: unknown ids are errors; otherwise remarks.
        here: `provider` or `engine`, depending on which of them determines the names.
        translate: finds the existing id of the same activation.

    Raises:
        ConfigError: an id (or its strategy) that the graph does not have; near matches come first in the message.
    """
    strategies: dict[str, set[int]] = {}
    for plan in existing:
        cluster_id, strategy, _ = plan.split(":")
        strategies.setdefault(cluster_id, set()).add(int(strategy))
    on, remarks = {}, []
    for request in config.requests:
        matching_id = translate(request.cluster_id, strategies)
        if not request.is_on and matching_id:
            continue
        if matching_id is None and is_fused(request.cluster_id) and len(config.requests) > 1:
            remarks.append(f"{excerpt(str(request))}: this {here} has no plan for that activation, left out")
            continue
        if matching_id is None or request.strategy not in strategies[matching_id]:
            problem = (
                _unknown(request.cluster_id, strategies)
                if matching_id is None
                else _wrong(request, strategies[matching_id])
            )
            if strict:
                raise ConfigError(problem)
            remarks.append(f"{problem}; left out")
            continue
        matched = Match(request, matching_id)
        if matching_id != request.cluster_id:
            remarks.append(f"{request} is {matched.plan} on this {here}: the same activation, not fused the same way")
        on.setdefault(matched.plan, matched)
    if not on and any(request.is_on for request in config.requests) and strict:
        raise ConfigError(f"{excerpt(str(config))}: nothing of it applies to this model; {_listing(strategies)}")
    return Matches(tuple(on.values()), tuple(remarks))


def _unknown(cluster_id: str, strategies: Mapping[str, set[int]]) -> str:
    return f'no plan "{excerpt(cluster_id)}" in this model; {_listing(strategies, near=cluster_id)}'


def _wrong(request: PlanRequest, available: set[int]) -> str:
    return f"{excerpt(str(request))}: this plan has strategy {' or '.join(map(str, sorted(available)))} only"


def _listing(strategies: Mapping[str, set[int]], near: str = "") -> str:
    by_likeness = difflib.get_close_matches(near, strategies, n=3, cutoff=0.5)
    ordered = by_likeness + sorted(set(strategies) - set(by_likeness))
    hint = f"did you mean {' or '.join(by_likeness)}? " if by_likeness else ""
    return f"{hint}Available: {', '.join(ordered) or 'none'}"
