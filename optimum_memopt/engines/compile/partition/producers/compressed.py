"""The producer of `--memory_opt_compress`: saves a plan's activations in fp8."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, decided_from, nodes_to_save
from optimum_memopt.engines.compile.graph.candidates import Candidate, compressions, roots_of
from optimum_memopt.engines.compile.graph.joint import root
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import Producer
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.matching import Matched


@dataclass(frozen=True)
class Compressed(Producer):
    """Compresses the activations that another producer's choice saves on the device, if they are candidates for it.

    Without a plan these are the activations that torch's own partition saves.
    """

    producer: Producer

    def match(self, candidates: Sequence[Candidate], are_layers_frozen: bool = False) -> Matched:
        return self.producer.match(candidates, are_layers_frozen)

    def knowing(self, candidates: Sequence[Candidate]) -> "Compressed":
        return replace(self, producer=self.producer.knowing(candidates))

    def refusal(self, why: str) -> MemOptError | None:
        return self.producer.refusal(why)

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        choice = _as_own_partition(graph, self.producer.choose(graph, earlier))
        saved = set(choice.nodes_to_save) - roots_of(choice.candidates)
        added = tuple(one for one in compressions(graph.candidates) if one.activation.root in saved)
        chosen = set(choice.candidates).union(added)
        candidates = tuple(candidate for candidate in graph.candidates if candidate in chosen)
        why = f"{choice.why}, what is saved in fp8"
        return with_exact_decisions(graph, replace(choice, candidates=candidates, why=why))


def with_exact_decisions(graph: AnalyzedGraph, choice: Choice) -> Choice:
    """Returns a choice without compression of the activations from which the backward recomputes integers."""
    exact = decided_from(graph, choice.nodes_to_save)
    dropped = {one for one in compressions(choice.candidates) if one.activation.root in exact}
    if not dropped:
        return choice
    candidates = tuple(candidate for candidate in choice.candidates if candidate not in dropped)
    why = f"{choice.why} ({len(dropped)} exact, from which integers are recomputed, as the choice of experts)"
    return replace(choice, candidates=candidates, why=why)


def _as_own_partition(graph: AnalyzedGraph, choice: Choice) -> Choice:
    """Converts a choice of torch's own graphs to one that this engine partitions and that saves the same storages."""
    if choice.torchs_graphs is None:
        return choice
    saved = {root(node) for node in choice.nodes_to_save}
    recomputed = {activation.root for activation in graph.activations} - saved
    return replace(choice, nodes_to_save=nodes_to_save(graph, recomputed, saved), torchs_graphs=None)
