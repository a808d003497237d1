"""The plan table of a model's compiled graphs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from optimum_memopt.engines.base import Selection
from optimum_memopt.plans.grammar import ALL, Strategy
from optimum_memopt.plans.table import Plan, PlanTable, canonical_symbols, sorted_plans

from .graphs import Graph
from .offers import Offer

_AUTO = "AUTO: torch makes {count} again by itself"


@dataclass(frozen=True)
class _Part:
    """One graph's share of a row, its saving in the table's symbols."""

    graph: Graph
    offer: Offer
    saving: sympy.Expr


def to_table(
    graphs: Sequence[Graph], selection: Selection, header: Sequence[str], is_encoder_decoder: bool
) -> PlanTable:
    """Rows of all graphs, those of one id and strategy together.

    Args:
        is_encoder_decoder: labels have the decoder's length (see `canonical_symbols`).
    """
    values = {
        name: graph.sizes[symbol] for graph in graphs for symbol, name in graph.names.items() if symbol in graph.sizes
    }
    canonical = canonical_symbols(values, is_encoder_decoder)
    rows: dict[str, list[_Part]] = {}
    for graph in graphs:
        symbols = {
            symbol: sympy.Symbol(canonical.get(name, name), integer=True, positive=True)
            for symbol, name in graph.names.items()
        }
        for offer in graph.offers:
            rows.setdefault(offer.config, []).append(_Part(graph, offer, offer.saving.subs(symbols)))
    return PlanTable(
        engine="compile",
        plans=sorted_plans(_plan(parts, selection) for parts in rows.values()),
        symbols={canonical.get(name, name): value for name, value in values.items()},
        header=tuple(header),
    )


def _plan(parts: Sequence[_Part], selection: Selection) -> Plan:
    occurrences = [(part.graph, made) for part in parts for made in part.offer.occurrences]
    free = sum(made in graph.free for graph, made in occurrences)
    return Plan(
        config=parts[0].offer.config,
        frequency=len(occurrences),
        saving_bytes=sum(int(part.offer.saving.subs(part.graph.sizes)) for part in parts),
        saving_symbolic=str(sympy.factor_terms(sympy.expand(sympy.Add(*(part.saving for part in parts))))),
        requested_count=_requested(parts[0].offer, selection),
        applied_count=sum(len(part.graph.chosen.get(part.offer, ())) for part in parts),
        note=_AUTO.format(count="all" if free == len(occurrences) else free) if free else "",
    )


def _requested(offer: Offer, selection: Selection) -> int:
    if selection.level:
        return (
            ALL if offer.strategy in (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)[: selection.level] else 0
        )
    requests: Mapping[tuple[str, Strategy], int] = (
        {(one.cluster_id, one.strategy): one.count for one in selection.config.requests} if selection.config else {}
    )
    return requests.get((offer.cluster_id, offer.strategy), 0)
