"""The plan table of a model's compiled graphs. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sympy

from optimum_memopt.engines.compile.analysis.candidates import Candidate, by_row
from optimum_memopt.engines.compile.loss.mode import ROW
from optimum_memopt.engines.compile.memory.symbolic_sizes import compile_sizes
from optimum_memopt.engines.compile.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.strategies import strategy_of
from optimum_memopt.engines.compile.symbol_names import SymbolNames
from optimum_memopt.plans.grammar import ALL
from optimum_memopt.plans.matching import Matched
from optimum_memopt.plans.table import Plan, PlanTable, sorted_plans

_AUTO = "AUTO: torch recomputes {count} by itself"


@dataclass(frozen=True)
class _Part:
    """One graph's share of a row.

    Attributes:
        symbols: of the graph to those of the table.
    """

    graph: PartitionedGraph
    candidates: Sequence[Candidate]
    symbols: dict[sympy.Symbol, sympy.Symbol]

    @property
    def saving(self) -> sympy.Expr:
        return sympy.Add(*(candidate.saving for candidate in self.candidates)).subs(self.symbols)

    @property
    def chosen(self) -> list[Candidate]:
        on = set(self.graph.choice.candidates)
        return [candidate for candidate in self.candidates if candidate in on]

    @property
    def auto_recomputed(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate in self.graph.choice.auto_recomputed]

    def bytes(self, candidates: Sequence[Candidate]) -> int:
        return sum(compile_sizes(candidate.saving for candidate in candidates)(self.graph.sizes))


def to_table(
    graphs: Sequence[PartitionedGraph], matched: Matched, names: SymbolNames, header: Sequence[str]
) -> PlanTable:
    """Rows of all graphs, those of one id and strategy together.

    Offload is listed where it is on, and where an activation cannot be recomputed, so that there is nothing else.

    Args:
        graphs: all graphs of a forward.
        matched: the rows that were asked for, in any of the graphs.
        names: of the graphs' symbols.
        header: lines above the table.
    """
    rows: dict[str, list[_Part]] = {}
    for graph in graphs:
        symbols = {
            symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in names.of_symbols(graph).items()
        }
        for row, candidates in by_row(graph.candidates).items():
            rows.setdefault(row, []).append(_Part(graph, candidates, symbols))
    recomputable = {
        candidate.cluster_id for graph in graphs for candidate in graph.candidates if candidate.chain is not None
    }
    plans = [
        _plan(row, parts, matched)
        for row, parts in rows.items()
        if row in matched.requests or _is_listed(parts, recomputable)
    ]
    plans.extend(_loss_plans(graphs, names))
    return PlanTable(engine="compile", plans=sorted_plans(plans), symbols=dict(names.first), header=tuple(header))


def _loss_plans(graphs: Sequence[PartitionedGraph], names: SymbolNames) -> list[Plan]:
    """The row of the losses: none where all logits are smaller than what a chunked loss saves, and nobody asked."""
    losses = [loss for graph in graphs for loss in graph.losses if loss.is_requested or loss.pays]
    if not losses:
        return []
    named = {symbol: name for graph in graphs for symbol, name in names.of_symbols(graph).items()}
    symbols = {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in named.items()}
    chunked = [loss for loss in losses if loss.is_chunked]
    notes = dict.fromkeys(loss.note for loss in losses)
    saving = sympy.Add(*(loss.saving for loss in losses)).subs(symbols)
    return [
        Plan(
            config=ROW,
            frequency=len(losses),
            saving_bytes=sum(loss.first_saving for loss in losses),
            saving_symbolic=str(sympy.factor_terms(sympy.expand(saving))),
            requested_count=ALL if any(loss.is_requested for loss in losses) else 0,
            applied_count=len(chunked),
            note="; ".join(notes),
            applied_saving_bytes=sum(loss.first_saving for loss in chunked),
            depends_on_batch=True,
        )
    ]


def _is_listed(parts: Sequence[_Part], recomputable: Collection[str]) -> bool:
    first = parts[0].candidates[0]
    return strategy_of(first.strategy).is_listed(_device_type(parts[0]), first.cluster_id in recomputable)


def _device_type(part: _Part) -> str:
    """Of the candidates, the accelerator's where any lies there."""
    types = {candidate.device_type for candidate in part.candidates}
    return min(types, key=lambda device_type: device_type == "cpu")


def _plan(row: str, parts: Sequence[_Part], matched: Matched) -> Plan:
    strategy = strategy_of(parts[0].candidates[0].strategy)
    device_type = _device_type(parts[0])
    saves = strategy.saves_on(device_type)
    frequency = sum(len(part.candidates) for part in parts)
    auto_recomputed = sum(len(part.auto_recomputed) for part in parts)
    auto = _AUTO.format(count="all" if auto_recomputed == frequency else auto_recomputed) if auto_recomputed else ""
    request = matched.requests.get(row)
    notes = {
        strategy.note_applied(part.chosen, part.graph.prediction, part.graph.sizes)
        for part in parts
        if saves and part.chosen and part.graph.prediction is not None
    }
    # Of several graphs, what is true of all of them.
    applied = notes if len(notes) == 1 else ()
    return Plan(
        config=row,
        frequency=frequency,
        saving_bytes=sum(part.bytes(part.candidates) for part in parts) if saves else 0,
        saving_symbolic=str(sympy.factor_terms(sympy.expand(sympy.Add(*(part.saving for part in parts if saves))))),
        requested_count=request.count if request else 0,
        applied_count=sum(len(part.chosen) for part in parts),
        note="; ".join(filter(None, (matched.note(row), strategy.note(device_type), *applied, auto))),
        applied_saving_bytes=sum(part.bytes(part.chosen) for part in parts) if saves else 0,
    )
