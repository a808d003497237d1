"""The plans of one training graph: which exist, which of them the selection applies, and their table."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.insight import applied_counts, parse_insight, to_plans
from optimum_memopt.engines.ort.post_norm import residual_normalizations
from optimum_memopt.engines.ort.selection import Choice, check_applied, choose_config, choose_level
from optimum_memopt.plans.table import PlanRow, PlanTable, canonical_symbols


@dataclass(frozen=True)
class GraphPlans:
    """Plans of a training graph.

    Attributes:
        rows: without requested and applied counts.
        symbols: canonical dimension names to their values in the first batch.
        choice: what ORT is asked to apply.
    """

    rows: tuple[PlanRow, ...] = ()
    symbols: Mapping[str, int] = field(default_factory=dict)
    choice: Choice = field(default_factory=Choice)

    def to_table(self, engine: str, text: str, header: tuple[str, ...]) -> PlanTable:
        """The table with requested and applied counts.

        Args:
            engine: name for the table.
            text: insight text with the counts that ORT applied.
            header: lines above the table.
        """
        counts = applied_counts(parse_insight(text))
        rows = tuple(_with_counts(row, self.choice, counts) for row in self.rows)
        return PlanTable(engine=engine, plans=rows, symbols=self.symbols, header=header)


def choose_plans(
    text: str,
    combinations: Mapping[str, int],
    dimensions: Mapping[str, int],
    is_encoder_decoder: bool,
    selection: Selection,
    graph: Any,
) -> GraphPlans:
    """Match a selection with the plans of a training graph.

    Args:
        text: ORT's insight text of the graph without plans.
        combinations: ORT's rows (configs joined by commas where only together they save) to their frequency.
        dimensions: names of the inputs' dynamic dimensions to their values in the first batch.
        is_encoder_decoder: see `canonical_symbols`.
        selection: the plans that were asked for.
        graph: the training graph (`onnx.GraphProto`).

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
    return GraphPlans(rows, symbols, choice)


def applied_remarks(plans: GraphPlans, text: str, selection: Selection) -> tuple[str, ...]:
    """Remarks about plans that ORT accepted and applied nowhere.

    Args:
        plans: of `choose_plans`.
        text: insight text with the counts that ORT applied.
        selection: the plans that were asked for.

    Raises:
        MemOptError: there are some, and the selection is a strict config.
    """
    counts = applied_counts(parse_insight(text))
    return check_applied(plans.choice, counts, selection.strict and not selection.level)


def _with_counts(row: PlanRow, choice: Choice, counts: Mapping[str, tuple[int, int]]) -> PlanRow:
    """The row with requested and applied counts; a joint row is on when all of its parts are."""
    parts = row.config.split(",")
    requested = -1 if all(part in choice.configs for part in parts) else 0
    applied = min(counts.get(part, (0, 0))[1] for part in parts) if requested else 0
    notes = dict.fromkeys(choice.notes[part] for part in parts if part in choice.notes)
    return replace(row, requested_count=requested, applied_count=min(applied, row.frequency), note="; ".join(notes))
