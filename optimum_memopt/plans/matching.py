"""Matches a user's requests with the plans of a graph: equivalent cluster ids and near matches. Pure.

The same activation has different cluster ids if ONNX Runtime fuses different operators: its CUDA provider fuses
bias and dropout operators that the CPU provider does not (onnxruntime 1.19.2,
core/optimizer/{bias_gelu_fusion,bias_softmax_fusion,bias_dropout_fusion,bitmask_dropout_replacement}.cc).
"""

import difflib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from optimum_memopt.errors import excerpt, listing
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, PlanRequest

# Maps a fused operator to unfused operators of the same activation, nearest first; the last of each produces it.
UNFUSED = {
    "BiasGelu": (("Gelu",), ("Add", "Gelu")),
    "BiasSoftmax": (("Softmax",), ("Add", "Softmax")),
    "BiasSoftmaxDropout": (("Softmax", "Dropout"), ("Add", "Softmax", "Dropout"), ("Dropout",)),
    "BitmaskDropout": (("Dropout",),),
    "BiasDropout": (("Add", "Dropout"), ("Dropout",), ("Add", "Dropout", "Add")),
    "BitmaskBiasDropout": (("Add", "Dropout"), ("Dropout",), ("Add", "Dropout", "Add")),
}


def operators(cluster_id: str) -> tuple[str, ...]:
    """Returns the operator names in a cluster id such as `FusedMatMul+Add+`."""
    return tuple(cluster_id.split("+")[:-1])


def is_fused(cluster_id: str) -> bool:
    """True if the id contains an operator that only some providers fuse."""
    return not UNFUSED.keys().isdisjoint(operators(cluster_id))


def unfused(cluster_id: str) -> tuple[str, ...]:
    """Returns ids of the same activation without provider-specific fusions, nearest first."""
    choices = [UNFUSED.get(operator, ((operator,),)) for operator in operators(cluster_id)]
    spelled = (itertools.chain.from_iterable(parts) for parts in itertools.product(*choices))
    return tuple("".join(f"{operator}+" for operator in parts) for parts in spelled)


def translate(cluster_id: str, existing: Collection[str]) -> str | None:
    """Returns the existing id of the same activation: itself, its unfused or its fused spelling; None without one."""
    if cluster_id in existing:
        return cluster_id
    fused = [other for other in existing if is_fused(other) and cluster_id in unfused(other)]
    nearest = min(fused, key=lambda other: (unfused(other).index(cluster_id), other), default=None)
    return next((other for other in unfused(cluster_id) if other in existing), nearest)


@dataclass(frozen=True)
class Matched:
    """The part of a config that applies to a graph.

    Attributes:
        requests: maps `cluster_id:strategy:-1` of each row that is on to its request, in the order of the requests.
        remarks: lines to log once.
        mistake: error text for the first request without a row, with near matches; empty if each has one.
    """

    requests: Mapping[str, PlanRequest] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    mistake: str = ""

    def note(self, row: str) -> str:
        """Returns the note for a row of the table; empty if the id is spelled as in the request."""
        request = self.requests.get(row)
        if request is None or request.cluster_id == row.split(":")[0]:
            return ""
        return f"requested as {request.cluster_id}"

    def check(self) -> None:
        """Raise a ConfigError if there is a mistake."""
        if self.mistake:
            raise ConfigError(self.mistake)


def match(
    config: PlanConfig,
    existing: Iterable[str],
    here: str,
    translate: Callable[[str, Collection[str]], str | None] = translate,
) -> Matched:
    """Find the row of each request; a request without a row is dropped, with a remark.

    Args:
        existing: `cluster_id:strategy:-1` of every row of the graph.
        here: `provider` or `engine`, whichever determines the ids; for remarks.
        translate: returns the existing id for a requested one, or None.
    """
    strategies: dict[str, set[int]] = {}
    for row in existing:
        cluster_id, strategy, _ = row.split(":")
        strategies.setdefault(cluster_id, set()).add(int(strategy))
    requests: dict[str, PlanRequest] = {}
    remarks, mistakes = [], []
    for request in config.requests:
        meant = translate(request.cluster_id, strategies)
        if not request.is_on and meant:
            continue
        if meant is None and is_fused(request.cluster_id) and len(config.requests) > 1:
            remarks.append(f"{excerpt(str(request))}: this {here} has no plan for this activation; left out")
            continue
        if meant is None or request.strategy not in strategies[meant]:
            if meant is None:
                listing = _listing(strategies, near=request.cluster_id)
                mistakes.append(f'no plan "{excerpt(request.cluster_id)}" in this model; {listing}')
            else:
                *others, last = map(str, sorted(strategies[meant]))
                available = f"strategies {', '.join(others)} and {last}" if others else f"strategy {last}"
                mistakes.append(f"{excerpt(str(request))}: this plan supports only {available}")
            remarks.append(f"{mistakes[-1]}; left out")
            continue
        row = f"{meant}:{int(request.strategy)}:{ALL}"
        if meant != request.cluster_id:
            remarks.append(f"{request} is {row} on this {here}: the same activation, fused differently")
        requests.setdefault(row, request)
    if not requests and any(request.is_on for request in config.requests):
        mistakes.append(f"{excerpt(str(config))}: no plan in it applies to this model; {_listing(strategies)}")
    return Matched(requests, tuple(remarks), next(iter(mistakes), ""))


def _listing(strategies: Mapping[str, set[int]], near: str = "") -> str:
    by_likeness = difflib.get_close_matches(near, strategies, n=3, cutoff=0.5)
    ordered = by_likeness + sorted(set(strategies) - set(by_likeness))
    return listing("available", ", ".join(ordered) or "none", by_likeness)
