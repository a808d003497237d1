"""Strategies 1 and 2: the backward recomputes activations that the forward does not save.

Strategy 2, recompute with compromise, saves something else in exchange: what must not run twice.
"""

from collections.abc import Mapping, Sequence

import sympy

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.graph.saved_activations import RecomputeChain, SavedActivation
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.events import Prediction
from optimum_memopt.engines.compile.partition.passes import barriers
from optimum_memopt.engines.compile.partition.strategies.registry import register_strategy
from optimum_memopt.plans.grammar import Strategy


class Recompute:
    """See `MemoryStrategy`."""

    numbers: tuple[Strategy, ...] = (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)

    def candidate(
        self,
        activation: SavedActivation,
        chain: RecomputeChain | None,
        cluster_id: str,
        size_hints: Mapping[sympy.Symbol, int],
    ) -> Candidate | None:
        if chain is None or chain.saving.subs(size_hints) <= 0:
            return None
        number = Strategy.RECOMPUTE_WITH_COMPROMISE if chain.is_compromise else Strategy.RECOMPUTE
        return Candidate(activation, number, cluster_id, chain.saving, chain)

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        """The partition has put the operators into the backward already, also those of no candidate (constants)."""
        barriers.insert(*modules)

    def saves_on(self, device_type: str) -> bool:
        return True

    def note(self, device_type: str) -> str:
        return ""

    def note_applied(self, candidates: Sequence[Candidate], prediction: Prediction, sizes: SymbolValues) -> str:
        return ""

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        return True


register_strategy(Recompute())
