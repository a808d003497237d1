"""An analyzed joint graph: what every producer of a choice is given. Pure."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from optimum_memopt.engines.compile.analysis.candidates import Candidate
from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_number, is_tensor, is_view, root
from optimum_memopt.engines.compile.analysis.saved_activations import SavedActivation, layer_of
from optimum_memopt.engines.compile.analysis.signature import Path
from optimum_memopt.engines.compile.memory.cuda_workspaces import Multiprocessors
from optimum_memopt.plans.plan_file import GraphSignature

Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, eq=False)
class AnalyzedGraph:
    """A joint graph, what its backward reads of its forward, and what can be done about it.

    Attributes:
        joint: dead code, copies and duplicates are gone.
        activations: in graph order.
        candidates: under every strategy.
        size_hints: value of each symbol in the first batch.
        names: of the symbols that are sizes of the forward's inputs, `input_ids_dim0`.
        static_inputs: inputs that stay where they are from step to step: parameters and buffers.
        constants: see `find_constants`.
        paths: see `node_paths`.
        signature: see `signature_of`.
        partition_by_torch: torch's own forward and backward graphs; changes the joint graph (CSE).
        cuda: the CUDA device that the graph is for; None: its tensors are elsewhere.
    """

    joint: JointGraph
    activations: tuple[SavedActivation, ...]
    candidates: tuple[Candidate, ...]
    size_hints: Mapping[sympy.Symbol, int]
    names: Mapping[sympy.Symbol, str]
    static_inputs: tuple[fx.Node, ...]
    constants: frozenset[fx.Node]
    paths: Mapping[fx.Node, Path]
    signature: GraphSignature
    partition_by_torch: Callable[[], Modules]
    cuda: Multiprocessors | None = None


def nodes_to_save(
    graph: AnalyzedGraph, recomputed: Collection[fx.Node], also_saved: Collection[fx.Node] = ()
) -> tuple[fx.Node, ...]:
    """What the forward has to save when the activations with the roots `recomputed` are not saved, in graph order.

    Every read of the backward is followed back until it reaches an input, an activation that stays saved, or what
    must not run twice (random draws). So nothing is saved that no read leads to, and nothing is drawn twice. Constants
    are not saved: they would wait through the whole step for what is computed in a moment.

    Args:
        graph: read, not changed.
        recomputed: roots of the activations that are recomputed.
        also_saved: roots that are no saved activations, or constants, and are saved when a read leads to them.
    """
    activations = {activation.root for activation in graph.activations}
    saved_roots = ((activations - graph.constants) | set(also_saved)) - set(recomputed)
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [node for activation in graph.activations for node in activation.reads]
    while todo:
        node = todo.pop()
        if node in seen or node.op == "placeholder" or is_number(node):
            continue
        seen.add(node)
        if node in saved_roots or (is_tensor(node) and graph.joint.is_impure(node)):
            saved.add(node)
        else:
            todo.extend(node.all_input_nodes)
    return tuple(sorted(saved, key=graph.joint.order.__getitem__))


def layer_boundaries(graph: AnalyzedGraph) -> frozenset[fx.Node]:
    """Storages computed in one layer and read in another: no layer is recomputed through the one before it.

    Constants are none: they are computed from no other layer.

    Without them a layer whose input is not saved (a norm that saves its output only) would be recomputed from the
    layer before, and so on to the first, all alive at once.
    """
    boundaries = set()
    for node in graph.joint.forward:
        if is_view(node):
            continue
        for read in node.all_input_nodes:
            storage = root(read)
            is_inside = is_tensor(read) and storage.op == "call_function" and layer_of(storage)
            if is_inside and layer_of(storage) != layer_of(node):
                boundaries.add(storage)
    return frozenset(boundaries) - graph.constants
