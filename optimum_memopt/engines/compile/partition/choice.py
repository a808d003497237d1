"""The choice for a joint graph, also as node numbers. A producer makes it; all later stages read nothing else."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, applied, compressions, offloads, roots_of
from optimum_memopt.engines.compile.graph.joint import is_tensor, root
from optimum_memopt.errors import MemOptError
from optimum_memopt.plans.matching import Matched
from optimum_memopt.plans.plan_file import GraphEntry, LayerEntry


@dataclass(frozen=True)
class InputsPlan:
    """The plan for a run's arguments that only its backward keeps alive, by their positions.

    Attributes:
        offloaded: arguments that wait on the host.
        recomputed: arguments that are recomputed by running again the run that returned them.
        is_repeated: this run runs again to recompute another run's arguments.
    """

    offloaded: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()
    is_repeated: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.offloaded or self.recomputed or self.is_repeated)

    @classmethod
    def split_from(cls, entry: LayerEntry) -> "tuple[InputsPlan, LayerEntry]":
        """Splits a plan file's entry into the plan for arguments and the remaining entry."""
        offloaded, offload = _places(entry.offload)
        recomputed, recompute = _places(path for path in entry.recompute if path != _AGAIN)
        plan = cls(offloaded, recomputed, _AGAIN in entry.recompute)
        return plan, replace(entry, recompute=recompute, offload=offload)

    def added_to(self, entry: LayerEntry) -> LayerEntry:
        """Returns the entry with this plan added, in the form that `split_from` reads."""
        again = (_AGAIN,) if self.is_repeated else ()
        offloaded, recomputed = (tuple(map(_INPUT.format, sorted(p))) for p in (self.offloaded, self.recomputed))
        return replace(entry, recompute=(*again, *recomputed, *entry.recompute), offload=(*offloaded, *entry.offload))


# Entries of a plan file: an argument of a layer's graph by its position, and the mark of a layer whose forward runs
# again to recompute another layer's arguments.
_INPUT, _AGAIN = "input {}", "forward"
_IS_INPUT = re.compile(_INPUT.format(r"(\d+)"))


def _places(paths: Iterable[str]) -> tuple[frozenset[int], tuple[str, ...]]:
    matches = {path: _IS_INPUT.fullmatch(path) for path in paths}
    places = frozenset(int(match[1]) for match in matches.values() if match)
    return places, tuple(path for path, match in matches.items() if not match)


@dataclass(frozen=True, eq=False)
class Choice:
    """The saved, recomputed, offloaded and compressed activations of one joint graph.

    Attributes:
        nodes_to_save: nodes that the forward saves for the backward, in graph order, without inputs and sizes.
            Offloaded and compressed activations are included: their strategies rewrite the two graphs afterwards.
        why: the reason for the choice, shown in the table's header: `level 1`.
        candidates: the candidates that are on, in the order of the graph's candidates.
        mismatch: how this graph differs from the one that a plan file was made for; empty if it does not.
        torchs_graphs: forward and backward graphs if torch partitioned the graph; None: this engine partitions it.
        is_for_all_runs: the choice holds for every run of the graph, so that it is made once.
        inputs: the plan for the run's arguments, in addition to the partition of its graph.
        draft_limit: bytes that the process may hold while the graph runs operator by operator, as a draft: not all
            graphs of the forward are known yet, and the forward runs again. None: the graph is compiled.
    """

    nodes_to_save: tuple[fx.Node, ...]
    why: str
    candidates: tuple[Candidate, ...] = ()
    auto_recomputed: frozenset[Candidate] = frozenset()
    matched: Matched = field(default_factory=Matched)
    mismatch: str = ""
    torchs_graphs: Modules | None = None
    is_for_all_runs: bool = False
    inputs: InputsPlan = field(default_factory=InputsPlan)
    draft_limit: int | None = None

    @property
    def recomputed(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.chain is not None)

    def check_file(self, is_strict: bool) -> str:
        """Returns the warning about a plan file for another graph; empty if the file matches.

        Raises:
            MemOptError: the file does not match, and must.
        """
        if not self.mismatch:
            return ""
        line = f"--memory_opt_plan: the file was made for a different graph: {self.mismatch}"
        if is_strict:
            raise MemOptError(f"{line}; make one for this model with --memory_opt_budget")
        return f"{line}; applying the parts that match"

    @property
    def key(self) -> str:
        """Returns a text that is the same for the same partition in every process, however it was requested."""
        saved = (node.name for node in self.nodes_to_save)
        chosen = (f"{int(candidate.strategy)}:{candidate.activation.root.name}" for candidate in self.candidates)
        text = f"saved {','.join(saved)}; chosen {','.join(chosen)}; by torch {self.torchs_graphs is not None}"
        return text if self.draft_limit is None else f"{text}; draft"


def torchs_choice(graph: AnalyzedGraph) -> Choice:
    """Returns the choice of torch's own partitioner, which takes seconds for a large graph."""
    forward, backward = graph.partition_by_torch()
    (output,) = forward.graph.find_nodes(op="output")
    saved = [node for node in output.args[0][graph.joint.num_fwd_outputs :] if isinstance(node, fx.Node)]
    # Matched by name, since torch's partitioner has copied the graph.
    names, roots = {node.name for node in saved}, {root(node).name for node in saved}
    nodes = (node for node in graph.joint.nodes if node.op == "call_function" and is_tensor(node))
    return Choice(
        nodes_to_save=tuple(node for node in nodes if node.name in names),
        why="no plan: torch's own partition",
        auto_recomputed=frozenset(c for c in graph.candidates if c.activation.root.name not in roots),
        torchs_graphs=(forward, backward),
    )


@dataclass(frozen=True)
class SavedNodes:
    """The saved, offloaded and compressed nodes of a choice, by their numbers in the joint graph.

    Attributes:
        saved: nodes saved for the backward, offloaded and compressed ones included.
        inputs: the plan for the run's arguments.
    """

    saved: tuple[int, ...]
    offloaded: frozenset[int] = frozenset()
    is_by_torch: bool = False
    inputs: InputsPlan = field(default_factory=InputsPlan)
    compressed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: AnalyzedGraph, choice: Choice) -> "SavedNodes":
        order = graph.joint.order
        saved = tuple(order[node] for node in choice.nodes_to_save)
        offloaded, compressed = (
            frozenset(map(order.__getitem__, roots_of(kept)))
            for kept in (offloads(choice.candidates), compressions(choice.candidates))
        )
        return cls(saved, offloaded, choice.torchs_graphs is not None, choice.inputs, compressed)

    def choice(self, graph: AnalyzedGraph, why: str) -> Choice:
        """Returns the choice for a trace of the graph."""
        if self.is_by_torch:
            return replace(torchs_choice(graph), why=why)
        saved, offloaded, compressed = (
            [graph.joint.nodes[number] for number in nodes] for nodes in (self.saved, self.offloaded, self.compressed)
        )
        candidates = applied(graph.candidates, set(saved), set(offloaded), set(compressed))
        return Choice(tuple(saved), why, candidates, inputs=self.inputs)


def graph_plan(graph: AnalyzedGraph, choice: Choice) -> GraphEntry:
    """Returns a graph's choice as an entry of a plan file.

    Args:
        graph: the analyzed graph; its joint graph is not read, since torch's partitioner changes it.
    """
    if choice.torchs_graphs is not None:
        return GraphEntry(graph.signature, by_torch=True)
    saved = set(choice.nodes_to_save)
    roots = {activation.root for activation in graph.activations}
    kinds: dict[str, Collection[fx.Node]] = {
        "recompute": roots - saved,
        "offload": roots_of(offloads(choice.candidates)),
        "compress": roots_of(compressions(choice.candidates)),
        "save": saved - roots,
    }
    layers: dict[str, dict[str, list[str]]] = {}
    for node, (layer, path) in graph.paths.items():
        for kind, nodes in kinds.items():
            if node in nodes:
                layers.setdefault(layer, {}).setdefault(kind, []).append(path)
    alike: dict[LayerEntry, list[str]] = {}
    for layer, paths_by_kind in layers.items():
        plan = LayerEntry((), **{kind: tuple(paths) for kind, paths in paths_by_kind.items()})
        alike.setdefault(plan, []).append(layer)
    return GraphEntry(
        graph.signature,
        by_torch=False,
        layers=tuple(replace(plan, layers=tuple(paths)) for plan, paths in alike.items()),
    )
