"""Reads ONNX Runtime's "MemoryInsight Summary", the text of its C++ memory optimizer.

The same call also returns a dict of symbolic savings, which counts one arbitrary output of each node (the first of a
hash map), so the saving of LayerNormalization or Dropout rows varies between identical runs. The text has all outputs.
Source: onnxruntime 1.19.2, orttraining/core/optimizer/memory_optimizer/memory_insight.cc; 1.19.2 is the last release.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import sympy

from optimum_memopt.plans.table import PlanRow, evaluated, simplified, sorted_plans

_FREQUENCY = re.compile(r"^\|(\d+)\s*\|")
_OPTION = re.compile(r">>Option \d+\s*: (Recompute|RecomputeWithCompromise) subgraph (\S+)")
_STATUS = re.compile(r"Status\s*: Enabled, requested count=(-?\d+), actual applied count=(\d+)")
_OUTPUT = re.compile(r"- Output \d+\s*: \[(.*)\], byte/elem: (\d+), (\d+)% saved")
_STRATEGY = {"Recompute": 1, "RecomputeWithCompromise": 2}


@dataclass(frozen=True)
class StashedOutput:
    """One tensor: number of elements as a formula in dimension names, bytes per element, saved part (0 to 1)."""

    elements: str
    element_bytes: int
    saved: float

    @property
    def formula(self) -> str:
        return f"({self.elements})*{self.element_bytes}*{self.saved}"


@dataclass(frozen=True)
class Opportunity:
    """Occurrences of one cluster id with equal stashed outputs.

    `reuses_buffer`: an output by_config another node's buffer, so both nodes may have to be recomputed together.
    """

    cluster_id: str
    strategy: int
    frequency: int
    outputs: tuple[StashedOutput, ...]
    reuses_buffer: bool = False
    requested_count: int = 0
    applied_count: int = 0

    @property
    def key(self) -> str:
        return f"{self.cluster_id}:{self.strategy}:-1"


def parse_insight(text: str) -> tuple[Opportunity, ...]:
    """All opportunities of an insight text, in its order."""
    opportunities: list[Opportunity] = []
    frequency = 0
    for line in text.splitlines():
        if match := _FREQUENCY.match(line):
            frequency = int(match[1])
        if match := _OPTION.search(line):
            opportunities.append(Opportunity(match[2], _STRATEGY[match[1]], frequency, ()))
        elif match := _STATUS.search(line):
            opportunities[-1] = replace(opportunities[-1], requested_count=int(match[1]), applied_count=int(match[2]))
        elif "ReuseFreq" in line:
            opportunities[-1] = replace(opportunities[-1], reuses_buffer=True)
        elif match := _OUTPUT.search(line):
            output = StashedOutput(match[1], int(match[2]), int(match[3]) / 100)
            opportunities[-1] = replace(opportunities[-1], outputs=(*opportunities[-1].outputs, output))
    return tuple(opportunities)


def to_plans(
    opportunities: Iterable[Opportunity],
    combinations: Mapping[str, int],
    names: Mapping[str, str],
    values: Mapping[str, int],
) -> tuple[PlanRow, ...]:
    """The rows of the plan table.

    Args:
        opportunities: of one insight text.
        combinations: ORT's rows (configs joined by commas where only together they save) to their frequency.
        names: ORT's dimension names to the names in the table.
        values: names in the table to their values in the first batch.
    """
    by_config: dict[str, list[Opportunity]] = {config: [] for config in combinations}
    unassigned = Counter({config: frequency for config, frequency in combinations.items() if "," in config})
    for opportunity in opportunities:
        joint = [config for config in unassigned if opportunity.key in config.split(",") and unassigned[config] > 0]
        if opportunity.reuses_buffer and joint:
            config = max(
                joint, key=lambda config: (unassigned[config] == opportunity.frequency, unassigned[config], config)
            )
            unassigned[config] -= opportunity.frequency
        else:
            config = opportunity.key
        if config in by_config:
            by_config[config].append(opportunity)
    return sorted_plans(
        _row(config, combinations[config], share, names, values) for config, share in by_config.items()
    )


def _row(
    config: str, frequency: int, share: list[Opportunity], names: Mapping[str, str], values: Mapping[str, int]
) -> PlanRow:
    terms = [f"{part.frequency}*{output.formula}" for part in share for output in part.outputs]
    saving = simplified(" + ".join(terms), names) if terms else sympy.Integer(0)
    return PlanRow(
        config=",".join(sorted(config.split(","))),
        frequency=frequency,
        saving_bytes=evaluated(saving, values),
        saving_symbolic=str(saving),
    )


def applied_counts(opportunities: Iterable[Opportunity]) -> dict[str, tuple[int, int]]:
    """`cluster_id:strategy:-1` to (requested count, applied count); one request for an id counts for all its cells."""
    counts: dict[str, tuple[int, int]] = {}
    for opportunity in opportunities:
        requested, applied = counts.get(opportunity.key, (0, 0))
        counts[opportunity.key] = (opportunity.requested_count or requested, applied + opportunity.applied_count)
    return counts
