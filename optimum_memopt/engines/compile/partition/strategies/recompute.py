"""Strategies 1 and 2: the backward recomputes activations that the forward does not save.

Strategy 2, recompute with compromise, saves other nodes in exchange: those that must not run twice.

Barriers keep a layer from being recomputed before its own backward begins. The graph has the right order, and without
a compiler it runs in that order. inductor orders by reads alone and fuses operators that read the same tensors: in
DeBERTa-v2, whose layers share relative positions, a layer's attention was recomputed in one kernel with the backward
of the next layer, and level 1 peaked two thirds higher. The inputs of a layer's recompute therefore pass through
an opaque operator that also reads what the backward has computed so far (`jax.lax.optimization_barrier` does the same,
for the same reason, around `jax.checkpoint`).
"""

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, RecomputeChain
from optimum_memopt.engines.compile.graph.joint import first_input, is_tensor, is_view, root, value
from optimum_memopt.engines.compile.graph.saved_activations import SavedActivation, layer_of
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.partition.strategies import MemoryStrategy, register_strategy
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY
from optimum_memopt.plans.grammar import Strategy

# Not a `custom_op`, which must not return its argument.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("after(Tensor(a) source, Tensor[] computed) -> Tensor(a)")


def _after(source: torch.Tensor, computed: list[torch.Tensor]) -> torch.Tensor:
    return source


# In a batched backward (`torch.autograd.grad(…, is_grads_batched=True)`, `torch.func.vmap`) the source keeps its batch
# dimension.
for _key in ("CompositeExplicitAutograd", "Batched", "FuncTorchBatched"):
    torch.library.impl(f"{LIBRARY}::after", _key, _after)
torch.library.register_fake(f"{LIBRARY}::after", _after)


class Recompute(MemoryStrategy):
    numbers = (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)

    def candidate(
        self, activation: SavedActivation, chain: RecomputeChain | None, cluster_id: str, size_hints: SymbolValues
    ) -> Candidate | None:
        if chain is None or chain.saving.subs(size_hints) <= 0:
            return None
        number = Strategy.RECOMPUTE_WITH_COMPROMISE if chain.is_compromise else Strategy.RECOMPUTE
        return Candidate(activation, number, cluster_id, chain.saving, chain)

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        """Adds barriers only: the partition has already put the recomputed operators into the backward, including
        those of no candidate (constants)."""
        insert_barriers(*modules)


register_strategy(Recompute())


def insert_barriers(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Make the recompute of each layer wait for the operators before it in the backward.

    A layer may be recomputed in several pieces: a part of it early, if another layer is recomputed from it, and the
    rest for its own backward. Each piece has its own barriers.

    Args:
        forward: not changed; operators that are also in the backward are recomputed.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    in_forward = {node.name for node in forward.graph.nodes}
    # Recomputed operators, by their layer and the layer that needs them.
    pieces: dict[tuple[str, str], list[fx.Node]] = {}
    needing = ""
    for node in reversed(nodes):
        if node.op != "call_function" or not (layer := layer_of(node)):
            continue
        if node.name not in in_forward:
            needing = layer
        elif not is_view(node):
            pieces.setdefault((layer, needing), []).insert(0, node)
    begin = 0
    for recomputed in sorted(pieces.values(), key=lambda piece: order[piece[0]]):
        here = order[recomputed[0]]
        computed = _computed_and_read(nodes[begin:here], in_forward, order, here)
        begin = here
        if computed:
            _add_barriers(graph, recomputed, computed, order)
    graph.lint()
    backward.recompile()


def _computed_and_read(
    nodes: list[fx.Node], in_forward: set[str], order: dict[fx.Node, int], here: int
) -> list[fx.Node]:
    """Returns the backward's own storages that `nodes`, all before `here`, compute and that operators from `here` on
    read."""
    roots = dict.fromkeys(
        root(node) for node in nodes if is_tensor(node) and any(order.get(user, here) >= here for user in node.users)
    )
    return [storage for storage in roots if storage.op == "call_function" and storage.name not in in_forward]


def _add_barriers(
    graph: fx.Graph, recomputed: list[fx.Node], computed: list[fx.Node], order: dict[fx.Node, int]
) -> None:
    """Make `recomputed` read the backward's inputs after `computed`.

    The barriers come before the first recomputed operator, where all of `computed` is still held anyway.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in recomputed:
        for read in node.all_input_nodes:
            if is_tensor(read) and root(read).op == "placeholder":
                reader = node
                # A view of an input that comes after the barriers reads the barrier's result.
                while order.get(read, 0) > order[recomputed[0]]:
                    reader, read = read, first_input(read)
                readers.setdefault(read, []).append(reader)
    for source, users in readers.items():
        with graph.inserting_before(recomputed[0]):
            barrier = graph.call_function(torch.ops.optimum_memopt.after.default, (source, computed))
        barrier.meta["val"] = value(source)
        for user in users:
            user.replace_input_with(source, barrier)
