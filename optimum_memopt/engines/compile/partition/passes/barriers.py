"""Keeps a layer from being recomputed before its own backward begins.

The graph has the right order, and without a compiler it runs in that order. inductor orders by reads alone and fuses
what reads the same: in DeBERTa-v2, whose layers share relative positions, a layer's attention was recomputed in one
kernel with the backward of the layer behind it, and level 1 peaked two thirds higher. What each layer is recomputed
from therefore passes an opaque operator that also reads what the backward has computed so far
(`jax.lax.optimization_barrier` does the same, for the same reason, around `jax.checkpoint`).
"""

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import first_input, is_tensor, is_view, root, value
from optimum_memopt.engines.compile.graph.saved_activations import layer_of
from optimum_memopt.engines.compile.torch_compat.fx_graph import LIBRARY

# The result is the argument, which `custom_op` does not allow.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("after(Tensor(a) source, Tensor[] computed) -> Tensor(a)")


@torch.library.impl(f"{LIBRARY}::after", "CompositeExplicitAutograd")
def _after(source: torch.Tensor, computed: list[torch.Tensor]) -> torch.Tensor:
    return source


@torch.library.register_fake(f"{LIBRARY}::after")
def _(source: torch.Tensor, computed: list[torch.Tensor]) -> torch.Tensor:
    return source


def insert(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Let the recompute of each layer wait for all that stands before it in the backward.

    A layer may be recomputed in several pieces: a part of it early, where another layer is recomputed from it, and the
    rest for its own backward. Each piece waits for itself.

    Args:
        forward: only read: what is in both graphs is recomputed.
        backward: recomputes each operator where the backward needs it.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    in_forward = {node.name for node in forward.graph.nodes}
    pieces: dict[tuple[str, str], list[fx.Node]] = {}
    # Of the operators' layers that are recomputed, in the order of the backward, with the layer that needs them.
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
    """What `nodes`, which stand before `here`, compute of the backward's own, and is read from there on."""
    roots = dict.fromkeys(
        root(node) for node in nodes if is_tensor(node) and any(order.get(user, here) >= here for user in node.users)
    )
    return [storage for storage in roots if storage.op == "call_function" and storage.name not in in_forward]


def _add_barriers(
    graph: fx.Graph, recomputed: list[fx.Node], computed: list[fx.Node], order: dict[fx.Node, int]
) -> None:
    """What `recomputed` read of the backward's inputs, they read after `computed`.

    The barriers stand before the first of them, where all that is computed is still held anyway.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in recomputed:
        for read in node.all_input_nodes:
            if is_tensor(read) and root(read).op == "placeholder":
                reader = node
                # Views of an input that stand behind the barriers read through one.
                while order.get(read, 0) > order[recomputed[0]]:
                    reader, read = read, first_input(read)
                readers.setdefault(read, []).append(reader)
    for source, users in readers.items():
        with graph.inserting_before(recomputed[0]):
            barrier = graph.call_function(torch.ops.optimum_memopt.after.default, (source, computed))
        barrier.meta["val"] = value(source)
        for user in users:
            user.replace_input_with(source, barrier)
