"""Keeps a layer from being made again before its own backward begins.

The graph has the right order, and without a compiler it is run in it. inductor orders by reads alone and fuses what
reads the same: in DeBERTa-v2, whose layers share relative positions, a layer's attention was made again in one kernel
with the backward of the layer behind it, and level 1 peaked two thirds higher. What each layer is made again from
therefore passes an operator that also reads what the backward has made so far, which no compiler looks into
(`jax.lax.optimization_barrier` is the same, for the same reason, around `jax.checkpoint`).
"""

import torch
from torch import fx

from optimum_memopt.engines.compile.analysis.joint import is_tensor, is_view, root, value
from optimum_memopt.engines.compile.analysis.saved_activations import layer_of
from optimum_memopt.engines.compile.passes.dropout import LIBRARY

# The result is the argument, which `custom_op` does not allow.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("after(Tensor(a) source, Tensor[] made) -> Tensor(a)")


@torch.library.impl(f"{LIBRARY}::after", "CompositeExplicitAutograd")
def _after(source: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    return source


@torch.library.register_fake(f"{LIBRARY}::after")
def _(source: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    return source


def insert(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Let each layer's second forward wait for all that stands before it in the backward.

    Args:
        forward: only read: what is in both graphs is made again.
        backward: each layer made again where its backward begins.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    forwarded = {node.name for node in forward.graph.nodes}
    again: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "call_function" and node.name in forwarded and not is_view(node) and (layer := layer_of(node)):
            again.setdefault(layer, []).append(node)
    begin = 0
    for copies in again.values():
        here = order[copies[0]]
        made = _made_and_read(nodes[begin:here], forwarded, order, here)
        begin = here
        if made:
            _wait(graph, copies, made, order)
    graph.lint()
    backward.recompile()


def _made_and_read(nodes: list[fx.Node], forwarded: set[str], order: dict[fx.Node, int], here: int) -> list[fx.Node]:
    """What `nodes`, which stand before `here`, make of the backward's own, and is read from there on."""
    roots = dict.fromkeys(
        root(node) for node in nodes if is_tensor(node) and any(order.get(user, here) >= here for user in node.users)
    )
    return [made for made in roots if made.op == "call_function" and made.name not in forwarded]


def _wait(graph: fx.Graph, copies: list[fx.Node], made: list[fx.Node], order: dict[fx.Node, int]) -> None:
    """What `copies` read of the backward's inputs, they read after `made`."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in copies:
        for read in node.all_input_nodes:
            if is_tensor(read) and root(read).op == "placeholder":
                readers.setdefault(read, []).append(node)
    for source, users in readers.items():
        with graph.inserting_before(min(users, key=order.__getitem__)):
            waiting = graph.call_function(torch.ops.optimum_memopt.after.default, (source, made))
        waiting.meta["val"] = value(source)
        for user in users:
            user.replace_input_with(source, waiting)
