"""A level: every transformer layer is recomputed from its input."""

from collections.abc import Sequence
from dataclasses import dataclass

from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile.analysis.candidates import Candidate, by_row
from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph, layer_boundaries, nodes_to_save
from optimum_memopt.engines.compile.choice import Choice
from optimum_memopt.plans.grammar import ALL, PlanRequest, Strategy
from optimum_memopt.plans.matching import Matched

# Those of level 1, and what level 2 adds.
_STRATEGIES = (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)


@dataclass(frozen=True)
class FromLevel:
    """See `Producer`."""

    level: int

    @classmethod
    def of(cls, selection: Selection) -> "FromLevel | None":
        return cls(selection.level) if selection.level else None

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """The rows of the level's strategies, whether or not any of their candidates lie in a layer."""
        requests = {
            row: PlanRequest(row_candidates[0].cluster_id, row_candidates[0].strategy, ALL)
            for row, row_candidates in by_row(candidates).items()
            if row_candidates[0].strategy in _STRATEGIES[: self.level]
        }
        if any(self._takes(candidate) for candidate in candidates):
            return Matched(requests)
        nothing = (
            f"--memory_opt_level {self.level}: nothing in a layer of this model can be recomputed from the layer's "
            "input; choose plans by name"
        )
        return Matched(requests, remarks=(nothing,))

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """All that is read in its own layer only."""
        chosen = tuple(candidate for candidate in graph.candidates if self._takes(candidate))
        recomputed = {candidate.activation.root for candidate in chosen}
        return Choice(
            nodes_to_save=nodes_to_save(graph, recomputed, layer_boundaries(graph)),
            why=f"level {self.level}",
            candidates=chosen,
            matched=self.match(graph.candidates),
        )

    def _takes(self, candidate: Candidate) -> bool:
        activation = candidate.activation
        is_in_layer = bool(activation.layer) and not activation.leaves_layer
        return is_in_layer and candidate.strategy in _STRATEGIES[: self.level]
