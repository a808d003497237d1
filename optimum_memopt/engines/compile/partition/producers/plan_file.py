"""A plan file: what it says of each graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Path, nodes_to_save
from optimum_memopt.engines.compile.graph.candidates import Candidate, offloads, recomputed
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.torch_default import TorchDefault
from optimum_memopt.plans.matching import Matched
from optimum_memopt.plans.plan_file import GraphEntry, LayerEntry, PlanFile


@dataclass(frozen=True)
class FromPlanFile:
    """See `Producer`."""

    file: PlanFile

    @classmethod
    def of(cls, selection: Selection) -> "FromPlanFile | None":
        return None if selection.plan is None else cls(selection.plan)

    def match(self, candidates: Sequence[Candidate]) -> Matched:
        """Nothing is asked for by row."""
        return Matched()

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice]) -> Choice:
        """What the file says of this graph, by its number; for another graph what goes, with what differs."""
        number, known = len(earlier), len(self.file.graphs)
        why = self.file.why if self.file.why.startswith("plan file") else f"plan file ({self.file.why})"
        if number >= known:
            mismatch = f"this is graph {number + 1} of the forward, and the file has {known}"
            return replace(TorchDefault().choose(graph, earlier), why=why, mismatch=mismatch)
        plan = self.file.graphs[number]
        mismatch = plan.signature.difference(graph.signature)
        if plan.by_torch:
            return replace(TorchDefault().choose(graph, earlier), why=why, mismatch=mismatch)
        nodes = {path: node for node, path in graph.paths.items()}
        roots = {activation.root for activation in graph.activations}
        offloadable = {candidate.activation.root: candidate for candidate in offloads(graph.candidates)}
        wanted = {kind: {nodes.get(path): path for path in _paths(plan, kind)} for kind in _KINDS}
        wrong = [
            (kind, path)
            for kind, among in (("recompute", roots), ("offload", offloadable), ("save", graph.paths))
            for node, path in wanted[kind].items()
            if node not in among
        ]
        if wrong and not mismatch:
            kind, (layer, path) = wrong[0]
            mismatch = f"there is no {path} {f'in {layer}' if layer else 'outside of layers'} to {kind}"
        found = {kind: {node for node in wanted[kind] if node is not None} for kind in _KINDS}
        # All but what it recomputes, constants that a budget has saved too.
        saved = nodes_to_save(graph, found["recompute"], roots | found["save"])
        chosen = {*recomputed(graph.candidates, frozenset(saved))}
        chosen |= {offloadable[node] for node in found["offload"] if node in offloadable and node in saved}
        return Choice(
            nodes_to_save=saved,
            why=why,
            candidates=tuple(candidate for candidate in graph.candidates if candidate in chosen),
            mismatch=mismatch,
        )


_KINDS = ("recompute", "offload", "save")


def _paths(plan: GraphEntry, kind: str) -> Iterator[Path]:
    for layers in plan.layers:
        for layer in layers.layers:
            for path in getattr(layers, kind):
                yield layer, path


def graph_plan(graph: AnalyzedGraph, choice: Choice) -> GraphEntry:
    """A choice for a graph in the words of a plan file.

    Args:
        graph: of which its joint graph is not read, since torch's own partition changes that.
        choice: for this graph.
    """
    if choice.torchs_graphs is not None:
        return GraphEntry(graph.signature, by_torch=True)
    saved = set(choice.nodes_to_save)
    roots = {activation.root for activation in graph.activations}
    offloaded = {candidate.activation.root for candidate in offloads(choice.candidates)}
    kinds: dict[str, set[fx.Node]] = {"recompute": roots - saved, "offload": offloaded, "save": saved - roots}
    layers: dict[str, dict[str, list[str]]] = {}
    for node, (layer, path) in graph.paths.items():
        for kind, nodes in kinds.items():
            if node in nodes:
                layers.setdefault(layer, {}).setdefault(kind, []).append(path)
    alike: dict[LayerEntry, list[str]] = {}
    for layer, found in layers.items():
        plan = LayerEntry((), **{kind: tuple(paths) for kind, paths in found.items()})
        alike.setdefault(plan, []).append(layer)
    return GraphEntry(
        graph.signature,
        by_torch=False,
        layers=tuple(replace(plan, layers=tuple(paths)) for plan, paths in alike.items()),
    )
