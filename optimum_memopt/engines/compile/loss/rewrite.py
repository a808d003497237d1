"""Replaces the losses of a graph that dynamo traced by the chunked loss."""

import operator

from torch import fx

from optimum_memopt.engines.compile.loss.chain import LossChain, traced_tensor
from optimum_memopt.engines.compile.loss.operators import CHUNKED_LOSS

# Where an operator was called; naming and levels read it from the nodes of the joint graph.
_ORIGIN = ("nn_module_stack", "source_fn_stack", "stack_trace")


def rewrite(graph: fx.Graph, chain: LossChain) -> None:
    """Compute a loss without its logits; graph changed in place."""
    loss = chain.cross_entropy
    with graph.inserting_before(loss):
        hidden = chain.hidden
        for taken in chain.slices:
            hidden = graph.call_function(operator.getitem, (hidden, taken.args[1]))
        bias, bias_needs_gradient = _bias(graph, chain)
        shape = chain.shape
        outputs = graph.call_function(
            CHUNKED_LOSS,
            (
                hidden,
                chain.weight,
                bias,
                chain.labels,
                chain.scaling.scale,
                chain.scaling.softcap,
                chain.ignore_index,
                chain.mean,
                chain.label_smoothing,
                shape.compute,
                traced_tensor(loss).dtype,
                shape.needs_hidden,
                shape.needs_weight,
                bias_needs_gradient,
            ),
        )
        result = graph.call_function(operator.getitem, (outputs, 0))
    for node in (outputs, result):
        node.meta.update({key: loss.meta[key] for key in _ORIGIN if key in loss.meta})
    loss.replace_all_uses_with(result)
    _erase(graph, loss, until=chain.projection)


def _bias(graph: fx.Graph, chain: LossChain) -> tuple[fx.Node | None, bool]:
    """One bias for all that is added to the projection's output, and whether it requires grad."""
    added = [node for node in (chain.bias, chain.offset) if node is not None]
    requires_grad = any(traced_tensor(node).requires_grad for node in added)
    if chain.offset is None:
        return chain.bias, requires_grad
    offset = graph.call_method("reshape", (chain.offset, (-1,)))
    if chain.bias is None:
        return offset, requires_grad
    return graph.call_function(operator.add, (chain.bias, offset)), requires_grad


def _erase(graph: fx.Graph, node: fx.Node, until: fx.Node) -> None:
    """Remove a node that nothing of the graph reads, and then what only it has read, back to `until`."""
    # A tensor that was detached for an output that is no longer there.
    for unread in tuple(node.users):
        graph.erase_node(unread)
    reads = node.all_input_nodes if node is not until else []
    graph.erase_node(node)
    for read in reads:
        if all(_is_unread(user) for user in read.users) and read.op != "placeholder":
            _erase(graph, read, until)


def _is_unread(node: fx.Node) -> bool:
    return node.op != "output" and not node.users
