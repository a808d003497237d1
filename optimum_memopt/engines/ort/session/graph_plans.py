"""The plans of a training graph: those that exist, those that are chosen, and their table. Pure.

They are read from ONNX Runtime's "MemoryInsight Summary", the text of its C++ memory optimizer. The same call also
returns a dict of symbolic savings, which counts one arbitrary output of each node (the first of a hash map), so the
saving of LayerNormalization or Dropout rows varies between identical runs. The text has all outputs.
Source: onnxruntime 1.19.2, orttraining/core/optimizer/memory_optimizer/memory_insight.cc; 1.19.2 is the last release.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.plans.grammar import ALL, ConfigError, PlanConfig, Strategy
from optimum_memopt.plans.matching import match, operators
from optimum_memopt.plans.table import PlanRow, PlanTable, canonical_symbols, evaluated, simplified, sorted_plans

NORMALIZATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
POST_NORM_REASON = (
    "left out: this normalization produces the residual stream; recomputing it keeps all layers alive (higher peak)"
)
RANDOM_OPERATORS = frozenset({"Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout", "BiasSoftmaxDropout"})
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

    `reuses_buffer`: an output reuses another node's buffer, so both nodes may have to be recomputed together.
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
    rows = []
    for config, parts in by_config.items():
        terms = [f"{part.frequency}*{output.formula}" for part in parts for output in part.outputs]
        saving = simplified(" + ".join(terms), names) if terms else sympy.Integer(0)
        name = ",".join(sorted(config.split(",")))
        rows.append(PlanRow(name, combinations[config], evaluated(saving, values), str(saving)))
    return sorted_plans(rows)


def applied_counts(opportunities: Iterable[Opportunity]) -> dict[str, tuple[int, int]]:
    """`cluster_id:strategy:-1` to (requested count, applied count); one request for an id counts for all its cells."""
    counts: dict[str, tuple[int, int]] = {}
    for opportunity in opportunities:
        requested, applied = counts.get(opportunity.key, (0, 0))
        counts[opportunity.key] = (opportunity.requested_count or requested, applied + opportunity.applied_count)
    return counts


def residual_normalizations(graph: Any) -> frozenset[str]:
    """The normalization operators whose output is itself a residual operand (post-LN: BERT, RoBERTa, DeBERTa).

    In post-LN models the input of each normalization depends on the output of the previous one, so recomputing one
    needs all of them and the chain stays alive through the backward pass. In pre-LN models (GPT-2, Llama, ViT) the
    residual stream bypasses the normalization, and recomputing it saves memory.

    Args:
        graph: an `onnx.GraphProto` of the training graph, forward nodes before the `YieldOp` that ends the forward.
    """
    consumers: dict[str, list[str]] = defaultdict(list)
    produced: list[tuple[str, str]] = []
    for node in graph.node:
        if node.op_type == "YieldOp":
            break
        for name in node.input:
            consumers[name].append(node.op_type)
        if node.op_type in NORMALIZATIONS:
            produced.append((node.op_type, node.output[0]))
    return frozenset(operator for operator, output in produced if "Add" in consumers[output])


@dataclass(frozen=True)
class Choice:
    """The plans to apply.

    Attributes:
        configs: `cluster_id:strategy:-1`, in the order of the request.
        notes: `cluster_id:strategy:-1` to a note for its row of the table.
        remarks: lines to log once.
    """

    configs: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def redraws_random_numbers(self) -> bool:
        return any(RANDOM_OPERATORS & set(operators(config.split(":")[0])) for config in self.configs)


def check_supported(config: PlanConfig) -> None:
    """Refuse what ONNX Runtime's memory optimizer does not support; needs no graph.

    Raises:
        ConfigError: a count other than -1 and 0 (ORT 1.18 and 1.19 apply every occurrence for any N >= 1), or offload.
    """
    for request in config.requests:
        shown = excerpt(str(request))
        if request.strategy is Strategy.OFFLOAD:
            raise ConfigError(f"{shown}: strategy 3 (offload) is not available on the ort engine; allowed: 0, 1, 2")
        if request.count not in (ALL, 0):
            raise ConfigError(
                f"{shown}: count {request.count} is not available on the ort engine, because ONNX Runtime 1.19 "
                "applies every occurrence for any count from 1; allowed: -1 (all) and 0 (off)"
            )


def choose_config(config: PlanConfig, existing: Iterable[str], strict: bool) -> Choice:
    """Match a user's config with the plans of the graph.

    Args:
        config: already checked by `check_supported`.
        existing: `cluster_id:strategy:-1` of every plan in the graph.
        strict: unknown ids are errors; otherwise remarks.

    Raises:
        ConfigError: an id (or its strategy) that the graph does not have; near matches come first in the message.
    """
    matched = match(config, existing, here="provider")
    if strict:
        matched.check()
    notes = {row: note for row in matched.requests if (note := matched.note(row))}
    return Choice(tuple(matched.requests), notes, matched.remarks)


def choose_level(level: int, existing: Iterable[str], residual_operators: Collection[str]) -> Choice:
    """All recomputable activations of each transformer layer, except those whose recompute raises the peak.

    Args:
        level: 1 (recompute), 2 (also with compromise).
        existing: `cluster_id:strategy:-1` of every plan in the graph.
        residual_operators: from `residual_normalizations`.
    """
    strategies = {Strategy.RECOMPUTE} if level == 1 else {Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE}
    configs, notes, existing = [], {}, tuple(existing)
    for plan in existing:
        cluster_id, strategy, _ = plan.split(":")
        if int(strategy) not in strategies:
            continue
        if set(operators(cluster_id)) & set(residual_operators):
            notes[plan] = POST_NORM_REASON
        elif int(strategy) == Strategy.RECOMPUTE_WITH_COMPROMISE and f"{cluster_id}:1:{ALL}" in existing:
            # ORT keeps one request per id, the last one.
            notes[plan] = "left out: this id is on with strategy 1, which saves all of its bytes"
        else:
            configs.append(plan)
    remarks = (
        (f"level {level} leaves out {len(notes)} of {len(configs) + len(notes)} plans, see the table's notes",)
        if notes
        else ()
    )
    return Choice(tuple(configs), notes, remarks)


def check_applied(choice: Choice, counts: Mapping[str, tuple[int, int]], strict: bool) -> str:
    """A line about plans that ORT accepted and applied nowhere, empty without any.

    Raises:
        MemOptError: there are some and `strict` is set.
    """
    idle = [config for config in choice.configs if counts.get(config, (0, 0))[1] == 0]
    remark = f"ONNX Runtime applied none of {', '.join(idle)}" if idle else ""
    if remark and strict:
        raise MemOptError(f"{remark}; leave them out of the config")
    return remark


@dataclass(frozen=True)
class GraphTable:
    """Plans of a training graph.

    Attributes:
        rows: without requested and applied counts.
        symbols: canonical dimension names to their values in the first batch.
        choice: what ORT is asked to apply.
    """

    rows: tuple[PlanRow, ...] = ()
    symbols: Mapping[str, int] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)

    def to_table(self, counts: Mapping[str, tuple[int, int]], header: str) -> PlanTable:
        """The table, with the counts that ORT applied (of `applied_counts`) and a line above it."""
        rows = tuple(_with_counts(row, self.choice, counts) for row in self.rows)
        return PlanTable(engine="ort", plans=rows, symbols=self.symbols, header=(header,))


def choose_plans(
    text: str,
    combinations: Mapping[str, int],
    dimensions: Mapping[str, int],
    is_encoder_decoder: bool,
    selection: Selection,
    graph: Any,
) -> GraphTable:
    """Match a selection with the plans of a training graph.

    Args:
        text: ORT's insight text of the graph without plans.
        combinations: ORT's rows (configs joined by commas where only together they save) to their frequency.
        dimensions: names of the inputs' dynamic dimensions to their values in the first batch.
        is_encoder_decoder: the kind of model, which names the dimensions.

    Raises:
        ConfigError: a strict config names a plan that the graph does not have.
    """
    names = canonical_symbols(dimensions, is_encoder_decoder)
    symbols = {names[name]: value for name, value in dimensions.items() if name in names}
    rows = to_plans(parse_insight(text), combinations, names, symbols)
    existing = dict.fromkeys(part for row in rows for part in row.config.split(","))
    choice = Choice()
    if selection.config is not None:
        choice = choose_config(selection.config, existing, selection.strict)
    elif selection.level:
        choice = choose_level(selection.level, existing, residual_normalizations(graph))
    return GraphTable(rows, symbols, choice)


def _with_counts(row: PlanRow, choice: Choice, counts: Mapping[str, tuple[int, int]]) -> PlanRow:
    """The row with requested and applied counts; a joint row is on when all of its parts are."""
    parts = row.config.split(",")
    requested = -1 if all(part in choice.configs for part in parts) else 0
    applied = min(counts.get(part, (0, 0))[1] for part in parts) if requested else 0
    notes = dict.fromkeys(choice.notes[part] for part in parts if part in choice.notes)
    return replace(row, requested_count=requested, applied_count=min(applied, row.frequency), note="; ".join(notes))
