"""A config: the rows that it names, each as often as it says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, nodes_to_save
from optimum_memopt.engines.compile.graph.candidates import Candidate, by_row
from optimum_memopt.engines.compile.graph.naming import translate
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import GraphContext, Producer
from optimum_memopt.plans import matching
from optimum_memopt.plans.grammar import ALL, PlanConfig
from optimum_memopt.plans.matching import Matched


@dataclass(frozen=True)
class FromConfig(Producer):
    config: PlanConfig

    @classmethod
    def of(cls, selection: Selection) -> "FromConfig | None":
        return None if selection.config is None else cls(selection.config)

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """Each request with the row that it means; a count of more than there are means all, with a remark."""
        frequencies = Counter(candidate.row for candidate in candidates)
        matched = matching.match(self.config, frequencies, here="engine", translate=translate)
        too_many = (
            f"{request}: there are {frequencies[row]} only, all of them are on"
            for row, request in matched.requests.items()
            if request.count != ALL and request.count > frequencies[row]
        )
        return replace(matched, remarks=(*matched.remarks, *too_many))

    def choose(self, graph: AnalyzedGraph, context: GraphContext) -> Choice:
        """The first `count` candidates of each row in graph order; a count runs on through all graphs."""
        matched = self.match(graph.candidates)
        taken = Counter(candidate.row for choice in context.earlier for candidate in choice.candidates)
        chosen: list[Candidate] = []
        for row, candidates in by_row(graph.candidates).items():
            if request := matched.requests.get(row):
                left = None if request.count == ALL else max(0, request.count - taken[row])
                chosen.extend(candidates[:left])
        recomputed = {candidate.activation.root for candidate in chosen if candidate.chain is not None}
        return Choice(
            nodes_to_save=nodes_to_save(graph, recomputed),
            why=f"config {self.config}",
            candidates=tuple(chosen),
            matched=matched,
        )
