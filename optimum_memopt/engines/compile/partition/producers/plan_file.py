"""A plan file: the choice that it has for each graph."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Path, nodes_to_save
from optimum_memopt.engines.compile.graph.candidates import offloads, recomputed
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import INSTEAD, GraphContext, Producer
from optimum_memopt.engines.compile.partition.producers.torch_default import TorchDefault
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.plans.plan_file import GraphEntry, PlanFile


@dataclass(frozen=True)
class FromPlanFile(Producer):
    file: PlanFile

    @classmethod
    def of(cls, selection: Selection) -> "FromPlanFile | None":
        return None if selection.plan is None else cls(selection.plan)

    def refusal(self, why: str) -> MemOptError | None:
        text = f"--memory_opt_plan: {why}, so that the file cannot be applied"
        return UnsupportedModelError(text, f"without the file {INSTEAD}")

    def choose(self, graph: AnalyzedGraph, context: GraphContext) -> Choice:
        """The file's entry for a graph, by its number; for another graph as far as it applies, with a mismatch."""
        number, count = len(context.earlier), len(self.file.graphs)
        why = self.file.why if self.file.why.startswith("plan file") else f"plan file ({self.file.why})"
        if number >= count:
            mismatch = f"this is graph {number + 1} of the forward, and the file has {count}"
            return replace(TorchDefault().choose(graph, context), why=why, mismatch=mismatch)
        plan = self.file.graphs[number]
        mismatch = plan.signature.difference(graph.signature)
        if plan.by_torch:
            return replace(TorchDefault().choose(graph, context), why=why, mismatch=mismatch)
        nodes = {path: node for node, path in graph.paths.items()}
        roots = {activation.root for activation in graph.activations}
        offloadable = {candidate.activation.root: candidate for candidate in offloads(graph.candidates)}
        wanted = {kind: {nodes.get(path): path for path in _paths(plan, kind)} for kind in _KINDS}
        wrong = [
            (kind, path)
            for kind, allowed in (("recompute", roots), ("offload", offloadable), ("save", graph.paths))
            for node, path in wanted[kind].items()
            if node not in allowed
        ]
        if wrong and not mismatch:
            kind, (layer, path) = wrong[0]
            mismatch = f"there is no {path} {f'in {layer}' if layer else 'outside of layers'} to {kind}"
        present = {kind: {node for node in wanted[kind] if node is not None} for kind in _KINDS}
        # All but what it recomputes, constants that a budget has saved too.
        saved = nodes_to_save(graph, present["recompute"], roots | present["save"])
        chosen = {*recomputed(graph.candidates, frozenset(saved))}
        chosen |= {offloadable[node] for node in present["offload"] if node in offloadable and node in saved}
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
