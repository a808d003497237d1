"""The producers of plans that the user specifies: a config, a level, a plan file."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, Path, layer_boundaries, nodes_to_save
from optimum_memopt.engines.compile.graph.candidates import (
    Candidate,
    applied,
    by_row,
    compressions,
    offloads,
    roots_of,
)
from optimum_memopt.engines.compile.graph.naming import translate
from optimum_memopt.engines.compile.graph.problem import Problem, problem_of
from optimum_memopt.engines.compile.memory.simulation import (
    GraphSimulation,
    held_at_peak,
    simulate,
    simulate_everything_saved,
)
from optimum_memopt.engines.compile.partition.choice import Choice, InputsPlan, torchs_choice
from optimum_memopt.engines.compile.partition.producers.compressed import with_exact_decisions
from optimum_memopt.engines.compile.partition.producers.producer import INSTEAD, Producer
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.plans import matching
from optimum_memopt.plans.grammar import ALL, PlanConfig, PlanRequest, Strategy
from optimum_memopt.plans.matching import Matched
from optimum_memopt.plans.plan_file import GraphEntry, LayerEntry, PlanFile

# Strategies of level 1, and of level 2 in addition.
_STRATEGIES = (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)
# torch's partitioner takes seconds. A level whose peak is at most this fraction of the peak with everything saved is
# not compared with it: by itself torch recomputes elementwise operators only, and never held less than a half.
_LOW = 1 / 3
# A layer is left out only if it raises the peak by more than this factor: most of the peak may be gradients, and later
# batches may be larger than the first one.
_HIGHER = 1.02


@dataclass(frozen=True)
class FromConfig(Producer):
    """The producer of a config's plans by name.

    Attributes:
        rows: number of candidates of each row in all graphs of a forward; empty before they are known.
    """

    config: PlanConfig
    rows: Mapping[str, int] = field(default_factory=dict, compare=False)

    def match(self, candidates: Sequence[Candidate], are_layers_frozen: bool = False) -> Matched:
        """Returns each request with the row that it names; a count above the number of candidates means all of them,
        with a remark."""
        frequencies = Counter(candidate.row for candidate in candidates) | Counter(self.rows)
        matched = matching.match(self.config, frequencies, here="engine", translate=translate)
        too_many = (
            f"{request}: there are only {frequencies[row]}, and all of them are on"
            for row, request in matched.requests.items()
            if request.count != ALL and request.count > frequencies[row]
        )
        return replace(matched, remarks=(*matched.remarks, *too_many))

    def knowing(self, candidates: Sequence[Candidate]) -> "FromConfig":
        return replace(self, rows=Counter(candidate.row for candidate in candidates))

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        """Chooses the first `count` candidates of each row in graph order; a count continues through all graphs."""
        matched = self.match(graph.candidates)
        taken = Counter(candidate.row for choice in earlier for candidate in choice.candidates)
        chosen: list[Candidate] = []
        for row, candidates in by_row(graph.candidates).items():
            if request := matched.requests.get(row):
                left = None if request.count == ALL else max(0, request.count - taken[row])
                chosen.extend(candidates[:left])
        recomputed = {candidate.activation.root for candidate in chosen if candidate.chain is not None}
        choice = Choice(
            nodes_to_save=nodes_to_save(graph, recomputed),
            why=f"config {self.config}",
            candidates=tuple(chosen),
            matched=matched,
        )
        return with_exact_decisions(graph, choice)


@dataclass(frozen=True)
class FromLevel(Producer):
    level: int

    def match(self, candidates: Sequence[Candidate], are_layers_frozen: bool = False) -> Matched:
        """Returns the rows of the level's strategies, whether or not their candidates are in a layer."""
        requests = {
            row: PlanRequest(row_candidates[0].cluster_id, row_candidates[0].strategy, ALL)
            for row, row_candidates in by_row(candidates).items()
            if row_candidates[0].strategy in _STRATEGIES[: self.level]
        }
        if any(self._takes(candidate) for candidate in candidates):
            return Matched(requests)
        if are_layers_frozen:
            waiting = f"--memory_opt_level {self.level}: no layer of this model trains; it applies once one does"
            return Matched(requests, remarks=(waiting,))
        why = "nothing in a layer of this model can be recomputed from the layer's input"
        if not any(candidate.activation.layer for candidate in candidates):
            why = (
                "no saved activation in the table lies in a layer (layers: at least two modules of a class in a "
                "ModuleList or Sequential)"
            )
        nothing = f"--memory_opt_level {self.level}: {why}; choose plans by name, or give a budget"
        return Matched(requests, remarks=(nothing,))

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        """Chooses all activations that only their own layer reads; torch's own partition in layers where recomputing
        them would raise the peak."""
        chosen = tuple(candidate for candidate in graph.candidates if self._takes(candidate))
        roots = {candidate.activation.root for candidate in chosen}
        choice = Choice(
            nodes_to_save=nodes_to_save(graph, roots, layer_boundaries(graph)),
            why=f"level {self.level}",
            candidates=chosen,
            matched=self.match(graph.candidates),
            is_for_all_runs=True,
        )
        return choice if not chosen else _without_a_higher_peak(graph, choice)

    def _takes(self, candidate: Candidate) -> bool:
        activation = candidate.activation
        is_in_layer = bool(activation.layer) and not activation.leaves_layer
        return is_in_layer and candidate.strategy in _STRATEGIES[: self.level]


def _without_a_higher_peak(graph: AnalyzedGraph, level: Choice) -> Choice:
    """Returns a level's choice, without a plan in layers whose recompute would raise the peak above that of no plan.

    If a layer is a loop over tokens (Mamba), torch saves little of it, and recomputing the whole layer holds all of
    its steps at once.
    """
    problem = problem_of(graph, [0.0] * len(graph.joint.nodes))

    def peak(run: GraphSimulation) -> int:
        """Returns the peak of one layer's graph, with the saved activations of all layers that are held meanwhile."""
        return run.peak + (graph.layers_at_once - 1) * run.saved_bytes

    simulation = simulate(problem, problem.saving(_numbers(graph, level)))
    if peak(simulation) <= _LOW * peak(simulate_everything_saved(problem)):
        return level
    own = torchs_choice(graph)
    by_level, by_torch = simulation.saved, problem.saving(_numbers(graph, own))
    most = _HIGHER * peak(simulate(problem, by_torch))
    layers: list[str] = []
    while peak(simulation) > most:
        layer = _recomputed_at_peak(problem, simulation)
        if not layer or layer in layers:
            why = f"{level.why}: recompute of layers would raise the peak, so torch's own partition"
            return replace(own, why=why, matched=level.matched, is_for_all_runs=True)
        layers.append(layer)
        kept = {node for node in by_torch if problem.layers[node] in layers}
        kept |= {node for node in by_level if problem.layers[node] not in layers}
        simulation = simulate(problem, problem.closure(kept))
    if not layers:
        return level
    saved = tuple(graph.joint.nodes[node] for node in sorted(simulation.saved))
    named = layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
    return replace(
        level,
        nodes_to_save=saved,
        why=f"{level.why}, less what would raise the peak in {named}",
        candidates=applied(graph.candidates, frozenset(saved)),
    )


def _numbers(graph: AnalyzedGraph, choice: Choice) -> list[int]:
    return [graph.joint.order[node] for node in choice.nodes_to_save]


def _recomputed_at_peak(problem: Problem, simulation: GraphSimulation) -> str:
    """Returns the layer that holds most recomputed bytes at the peak of the backward; empty if there is none."""
    if simulation.forward.peak >= simulation.backward.peak:
        return ""
    sizes: Counter[str] = Counter()
    for node, size in held_at_peak(problem, simulation, in_backward=True).items():
        if problem.layers[node] and problem.is_forward[node] and node not in simulation.saved:
            sizes[problem.layers[node]] += size
    return sizes.most_common(1)[0][0] if sizes else ""


@dataclass(frozen=True)
class FromPlanFile(Producer):
    file: PlanFile

    def refusal(self, why: str) -> MemOptError | None:
        text = f"--memory_opt_plan: {why}, so that the file cannot be applied"
        return UnsupportedModelError(text, f"without the file {INSTEAD}")

    def choose(self, graph: AnalyzedGraph, earlier: Sequence[Choice] = ()) -> Choice:
        """Chooses the file's entry with the graph's signature, else the closest one, which is applied as far as
        possible, with a mismatch."""
        number, count = len(earlier), len(self.file.graphs)
        why = self.file.why if self.file.why.startswith("plan file") else f"plan file ({self.file.why})"
        found = [entry for entry in self.file.graphs if entry.signature == graph.signature] or self._closest(graph)
        if not found and number >= count:
            mismatch = f"this is graph {number + 1} of the forward, and the file has {count}"
            return replace(torchs_choice(graph), why=why, mismatch=mismatch)
        plan = (*found, *self.file.graphs[number:])[0]
        mismatch = self._difference(plan, graph)
        if plan.by_torch:
            return replace(torchs_choice(graph), why=why, mismatch=mismatch)
        inputs = InputsPlan()
        if graph.layer:
            own = next((entry for entry in plan.layers if graph.layer in entry.layers), None)
            mismatch = mismatch or ("" if own is not None else _without_plan(plan, graph))
            inputs, own = InputsPlan.split_from(own or LayerEntry(()))
            plan = replace(plan, layers=(own,))
        nodes = {path: node for node, path in graph.paths.items()}
        wanted = {kind: {nodes.get(path): path for path in _paths(plan, kind, graph)} for kind in _KINDS}
        mismatch = mismatch or _missing(wanted, graph)
        if places := (inputs.offloaded | inputs.recomputed).difference(graph.places):
            mismatch = mismatch or f"{graph.layer} has no input {min(places)}"
            inputs = InputsPlan()
        present = {kind: {node for node in wanted[kind] if node is not None} for kind in _KINDS}
        # All activations that the plan does not recompute, including constants, which a budget may have saved.
        roots = {activation.root for activation in graph.activations}
        saved = nodes_to_save(graph, present["recompute"], roots | present["save"])
        kept = (present[kind].intersection(saved) for kind in ("offload", "compress"))
        choice = Choice(
            nodes_to_save=saved,
            why=why,
            candidates=applied(graph.candidates, frozenset(saved), *kept),
            mismatch=mismatch,
            inputs=inputs,
        )
        return with_exact_decisions(graph, choice)

    def _closest(self, graph: AnalyzedGraph) -> list[GraphEntry]:
        """Returns the entries for the graph's layer, or for code outside of layers, sorted by the number of its
        operators that they name, then by the number that they have; largest first."""
        known, operators = set(graph.paths.values()), Counter(graph.signature.operators)

        def shared(entry: GraphEntry) -> tuple[int, int]:
            named = sum(path in known for kind in _KINDS for path in _paths(entry, kind, graph))
            return named, (operators & Counter(entry.signature.operators)).total()

        own = (
            entry
            for entry in self.file.graphs
            # An entry without plans is for code outside of layers, or by torch.
            if any(graph.layer in each.layers for each in entry.layers) or not (entry.layers or graph.layer)
        )
        return sorted(own, key=shared, reverse=True)

    def _difference(self, plan: GraphEntry, graph: AnalyzedGraph) -> str:
        """Returns the difference between a graph and an entry's signature in words; empty if there is none."""
        difference = plan.signature.difference(graph.signature)
        if not difference or self.file.has_padding:
            return difference
        shorter = "" if self.file.has_local_masks else ", and for rows shorter than local attention's window"
        return f"{difference} (the file is for batches without padding{shorter})"


def _without_plan(plan: GraphEntry, graph: AnalyzedGraph) -> str:
    count = sum(len(entry.layers) for entry in plan.layers)
    return f"it has plans for {count} layers, but none for {graph.layer}"


def _missing(wanted: Mapping[str, Mapping[fx.Node | None, Path]], graph: AnalyzedGraph) -> str:
    """Returns the first path to which a graph cannot apply what is wanted, in words; empty if there is none.

    Args:
        wanted: the paths by kind and by the graph's node; None: the graph has no such node.
    """
    allowed: dict[str, Collection[fx.Node]] = {
        "recompute": {activation.root for activation in graph.activations},
        "offload": roots_of(offloads(graph.candidates)),
        "compress": roots_of(compressions(graph.candidates)),
        "save": graph.paths,
    }
    for kind, nodes in allowed.items():
        for node, (layer, path) in wanted[kind].items():
            if node not in nodes:
                return f"there is no {path} {f'in {layer}' if layer else 'outside of layers'} to {kind}"
    return ""


_KINDS = ("recompute", "offload", "compress", "save")


def _paths(plan: GraphEntry, kind: str, graph: AnalyzedGraph) -> Iterator[Path]:
    """Yields an entry's paths in the graph, whose paths name the first of several equal layers."""
    first = next((layer for layer, _ in graph.paths.values()), "") if graph.layer else ""
    for layers in plan.layers:
        for layer in [first] if graph.layer else layers.layers:
            for path in getattr(layers, kind):
                yield layer, path
