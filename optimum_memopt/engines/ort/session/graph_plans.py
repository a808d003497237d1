"""The plans of a training graph: available and chosen plans, and their table. Pure.

The available plans are parsed from ONNX Runtime's "MemoryInsight Summary", the text of its C++ memory optimizer. The
same call also returns a dict of symbolic savings, but that counts one arbitrary output of each node (the first of a
hash map), so the saving of LayerNormalization or Dropout rows varies between identical runs. The text has all outputs.
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
_STATUS = re.compile(r"Status\s*: Enabled, requested count=-?\d+, actual applied count=(\d+)")
_OUTPUT = re.compile(r"- Output \d+\s*: \[(.*)\], byte/elem: (\d+), (\d+)% saved")
_STRATEGY = {"Recompute": 1, "RecomputeWithCompromise": 2}


@dataclass(frozen=True)
class Opportunity:
    """Occurrences of one cluster id with equal stashed outputs.

    Attributes:
        config: `cluster_id:strategy:-1`.
        frequency: number of occurrences.
        savings: bytes of each stashed output, as a formula in dimension names.
        reuses_buffer: whether an output reuses another node's buffer, so that both nodes may need to be recomputed
            together.
        applied_count: number of occurrences that ORT recomputes.
    """

    config: str
    frequency: int
    savings: tuple[str, ...] = ()
    reuses_buffer: bool = False
    applied_count: int = 0


def parse_insight(text: str) -> tuple[Opportunity, ...]:
    opportunities: list[Opportunity] = []
    frequency = 0
    for line in text.splitlines():
        if match := _FREQUENCY.match(line):
            frequency = int(match[1])
        if match := _OPTION.search(line):
            opportunities.append(Opportunity(f"{match[2]}:{_STRATEGY[match[1]]}:{ALL}", frequency))
        elif match := _STATUS.search(line):
            opportunities[-1] = replace(opportunities[-1], applied_count=int(match[1]))
        elif "ReuseFreq" in line:
            opportunities[-1] = replace(opportunities[-1], reuses_buffer=True)
        elif match := _OUTPUT.search(line):
            saving = f"({match[1]})*{match[2]}*{int(match[3]) / 100}"
            opportunities[-1] = replace(opportunities[-1], savings=(*opportunities[-1].savings, saving))
    return tuple(opportunities)


def to_plans(
    opportunities: Iterable[Opportunity],
    combinations: Mapping[str, int],
    names: Mapping[str, str],
    values: Mapping[str, int],
) -> tuple[PlanRow, ...]:
    """Returns the rows of the plan table.

    Args:
        combinations: ORT's rows to their frequency; a row joins configs by commas if they save memory only together.
        names: ORT's dimension names to the names in the table.
        values: names in the table to their values in the first batch.
    """
    by_config: dict[str, list[Opportunity]] = {config: [] for config in combinations}
    unassigned = Counter({config: frequency for config, frequency in combinations.items() if "," in config})
    for opportunity in opportunities:
        config, frequency = opportunity.config, opportunity.frequency
        joint = [
            (left == frequency, left, row) for row, left in unassigned.items() if left > 0 and config in row.split(",")
        ]
        if opportunity.reuses_buffer and joint:
            config = max(joint)[-1]
            unassigned[config] -= frequency
        if config in by_config:
            by_config[config].append(opportunity)
    rows = []
    for config, parts in by_config.items():
        terms = [f"{part.frequency}*{saving}" for part in parts for saving in part.savings]
        saving = simplified(" + ".join(terms), names) if terms else sympy.Integer(0)
        name = ",".join(sorted(config.split(",")))
        rows.append(PlanRow(name, combinations[config], evaluated(saving, values), str(saving)))
    return sorted_plans(rows)


def applied_counts(opportunities: Iterable[Opportunity]) -> Counter[str]:
    """Returns how often ORT applied each `cluster_id:strategy:-1`."""
    counts: Counter[str] = Counter()
    for opportunity in opportunities:
        counts[opportunity.config] += opportunity.applied_count
    return counts


def residual_normalizations(graph: Any) -> frozenset[str]:
    """Returns the normalization operators of a training graph whose output is a residual operand (post-LN: BERT,
    DeBERTa).

    In post-LN models the input of each normalization depends on the output of the previous one, so recomputing one
    needs all of them, and the chain stays alive through the backward. In pre-LN models (GPT-2, Llama, ViT) the
    residual stream bypasses the normalization, and recomputing it saves memory.
    """
    consumers: dict[str, list[str]] = defaultdict(list)
    produced = []
    for node in graph.node:
        if node.op_type == "YieldOp":
            break
        for name in node.input:
            consumers[name].append(node.op_type)
        if node.op_type in NORMALIZATIONS:
            produced.append((node.op_type, node.output[0]))
    return frozenset(operator for operator, output in produced if "Add" in consumers[output])


@dataclass(frozen=True)
class ChosenPlans:
    """The plans to apply.

    Attributes:
        configs: each `cluster_id:strategy:-1`, in the order of the request.
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
    """Refuse plans that ONNX Runtime's memory optimizer does not support.

    Raises:
        ConfigError: offload, compress, or a count other than -1 and 0: ORT 1.18 and 1.19 apply every occurrence for
            any N >= 1.
    """
    for request in config.requests:
        shown = excerpt(str(request))
        if request.strategy in (Strategy.OFFLOAD, Strategy.COMPRESS):
            name = f"strategy {int(request.strategy)} ({request.strategy.name.lower()})"
            raise ConfigError(f"{shown}: {name} is not available on the ort engine; allowed: 0, 1, 2")
        if request.count not in (ALL, 0):
            raise ConfigError(
                f"{shown}: count {request.count} is not available on the ort engine, because ONNX Runtime 1.19 "
                "applies every occurrence for any count from 1; allowed: -1 (all) and 0 (off)"
            )


def choose_config(config: PlanConfig, existing: Iterable[str], strict: bool) -> ChosenPlans:
    """Match a user's config with `existing`, the plans of the graph.

    Raises:
        ConfigError: an unknown id or strategy, if `strict`; otherwise it becomes a remark.
    """
    matched = match(config, existing, here="provider")
    if strict:
        matched.check()
    notes = {row: note for row in matched.requests if (note := matched.note(row))}
    return ChosenPlans(tuple(matched.requests), notes, matched.remarks)


def choose_level(level: int, existing: Iterable[str], residual_operators: Collection[str]) -> ChosenPlans:
    """Returns the plans in `existing` of level 1 (recompute) or 2 (also with compromise), without plans that raise the
    peak."""
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
    remark = f"level {level} leaves out {len(notes)} of {len(configs) + len(notes)} plans, see the table's notes"
    return ChosenPlans(tuple(configs), notes, (remark,) if notes else ())


def check_applied(choice: ChosenPlans, counts: Mapping[str, int], strict: bool) -> str:
    """Returns a line about plans that ORT accepted but never applied; empty if there are none.

    Raises:
        MemOptError: there are such plans and `strict` is set.
    """
    idle = [config for config in choice.configs if not counts.get(config)]
    remark = f"ONNX Runtime applied none of {', '.join(idle)}" if idle else ""
    if remark and strict:
        raise MemOptError(f"{remark}; leave them out of the config")
    return remark


@dataclass(frozen=True)
class GraphTable:
    """Plans of a training graph.

    Attributes:
        rows: rows of the plan table, without requested and applied counts.
        symbols: canonical dimension names to their values in the first batch.
        choice: plans that ORT is asked to apply.
    """

    rows: tuple[PlanRow, ...] = ()
    symbols: Mapping[str, int] = field(default_factory=dict)
    choice: ChosenPlans = field(default_factory=ChosenPlans)

    def to_table(self, counts: Mapping[str, int], header: str) -> PlanTable:
        """Returns the plan table with the counts of `applied_counts`, and `header` as the line above it."""
        rows = tuple(self._with_counts(row, counts) for row in self.rows)
        return PlanTable(engine="ort", plans=rows, symbols=self.symbols, header=(header,))

    def _with_counts(self, row: PlanRow, counts: Mapping[str, int]) -> PlanRow:
        """Returns a row with its counts and notes; a joint row is requested if all of its parts are."""
        parts, choice = row.config.split(","), self.choice
        requested = ALL if all(part in choice.configs for part in parts) else 0
        applied = min(counts.get(part, 0) for part in parts) if requested else 0
        note = "; ".join(dict.fromkeys(choice.notes[part] for part in parts if part in choice.notes))
        return replace(row, requested_count=requested, applied_count=min(applied, row.frequency), note=note)


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
        combinations: as in `to_plans`.
        dimensions: as in `SessionInternals`.

    Raises:
        ConfigError: a strict config names a plan that the graph does not have.
    """
    names = canonical_symbols(dimensions, is_encoder_decoder)
    symbols = {names[name]: value for name, value in dimensions.items() if name in names}
    rows = to_plans(parse_insight(text), combinations, names, symbols)
    existing = dict.fromkeys(part for row in rows for part in row.config.split(","))
    choice = ChosenPlans()
    if selection.config is not None:
        choice = choose_config(selection.config, existing, selection.strict)
    elif selection.level:
        choice = choose_level(selection.level, existing, residual_normalizations(graph))
    return GraphTable(rows, symbols, choice)
