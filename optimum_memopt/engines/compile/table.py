"""The plan table of a model's compiled graphs. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sympy

from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile.analysis.candidates import Candidate
from optimum_memopt.engines.compile.analysis.saved_activations import RecomputeChain
from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph
from optimum_memopt.plans.grammar import ALL, Strategy
from optimum_memopt.plans.matching import Matches
from optimum_memopt.plans.table import Plan, PlanTable, canonical_symbols, sorted_plans

_AUTO = "AUTO: torch makes {count} again by itself"
_OFFLOAD = "offload"
_OFFLOAD_ON_CPU = "offload; saves nothing on the CPU, whose memory is the host's"


@dataclass(frozen=True)
class _Part:
    """One graph's share of a row, its saving in the table's symbols."""

    graph: PartitionedGraph
    candidate: Candidate
    saving: sympy.Expr


def to_table(
    graphs: Sequence[PartitionedGraph],
    selection: Selection,
    asked: Matches,
    header: Sequence[str],
    is_encoder_decoder: bool,
) -> PlanTable:
    """Rows of all graphs, those of one id and strategy together.

    Offload is shown where it is on, and where a stash cannot be made again, so that there is nothing else.

    Args:
        asked: what the selection's config means.
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
        for candidate in graph.candidates:
            rows.setdefault(candidate.config, []).append(_Part(graph, candidate, candidate.saving.subs(symbols)))
    remade = {
        candidate.cluster_id
        for graph in graphs
        for candidate in graph.candidates
        if candidate.strategy is not Strategy.OFFLOAD
    }
    plans = [_plan(parts, selection, asked) for parts in rows.values() if _is_shown(parts, remade, asked)]
    return PlanTable(
        engine="compile",
        plans=sorted_plans(plans),
        symbols={canonical.get(name, name): value for name, value in values.items()},
        header=tuple(header),
    )


def _is_shown(parts: Sequence[_Part], remade: Collection[str], asked: Matches) -> bool:
    candidate = parts[0].candidate
    if candidate.strategy is not Strategy.OFFLOAD or any(one.plan == candidate.config for one in asked.on):
        return True
    return candidate.cluster_id not in remade and not candidate.is_on_cpu


def _plan(parts: Sequence[_Part], selection: Selection, asked: Matches) -> Plan:
    config, strategy = parts[0].candidate.config, parts[0].candidate.strategy
    saves = strategy is not Strategy.OFFLOAD or not parts[0].candidate.is_on_cpu
    occurrences = [(part.graph, made) for part in parts for made in part.candidate.occurrences]
    chosen = [(part.graph, made) for part in parts for made in part.graph.chosen.get(part.candidate, ())]
    auto_recomputed = sum(made in graph.auto_recomputed for graph, made in occurrences)
    meant = next((one for one in asked.on if one.plan == config), None)
    notes = (
        meant.note if meant else "",
        "" if strategy is not Strategy.OFFLOAD else _OFFLOAD if saves else _OFFLOAD_ON_CPU,
        _AUTO.format(count="all" if auto_recomputed == len(occurrences) else auto_recomputed)
        if auto_recomputed
        else "",
    )
    return Plan(
        config=config,
        frequency=len(occurrences),
        saving_bytes=_bytes(occurrences) if saves else 0,
        saving_symbolic=str(sympy.factor_terms(sympy.expand(sympy.Add(*(part.saving for part in parts if saves))))),
        requested_count=meant.request.count if meant else _of_level(parts[0].candidate, selection.level),
        applied_count=len(chosen),
        note="; ".join(filter(None, notes)),
        applied_saving_bytes=_bytes(chosen) if saves else 0,
    )


def _bytes(occurrences: Sequence[tuple[PartitionedGraph, RecomputeChain]]) -> int:
    return sum(int(made.saving.subs(graph.sizes)) for graph, made in occurrences)


def _of_level(candidate: Candidate, level: int) -> int:
    return ALL if candidate.strategy in (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)[:level] else 0
