"""Common subexpression elimination: what a joint graph computes twice from the same inputs it computes once.

Under autocast a query, a key and a value projection each cast the same tensor, and each saves its cast. torch's
min-cut partitioner removes such duplicates too (`torch/_functorch/compile_utils.py`, `fx_graph_cse`), but not before
the analysis, and it lets the backward read a duplicate of the forward, which would be one more saved activation. Here
forward and backward are separate. Pure but for the graph that is changed.
"""

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import JointGraph, is_number, root

_DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def eliminate_duplicates(joint: JointGraph) -> None:
    """Replace each operator of the joint graph by an earlier one of the same pass that computes the same.

    Left alone is what draws random numbers or reads what is written to; what the graph returns, since its caller may
    write to it; and what reads no tensor (zeros, ranges): it costs next to nothing, and one for all would be held from
    the first read to the last.

    Args:
        joint: its graph is changed; nothing that was read of it holds any more.
    """
    returned = {root(node) for node in joint.outputs if isinstance(node, fx.Node)}
    known: dict[Hashable, fx.Node] = {}
    for node in joint.nodes:
        if not _is_replaceable(joint, node) or root(node) in returned:
            continue
        first = known.setdefault((node in joint.backward, node.target, _key((node.args, node.kwargs))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            joint.module.graph.erase_node(node)


def _is_replaceable(joint: JointGraph, node: fx.Node) -> bool:
    # Sizes that depend on data are new symbols at each call.
    is_data_dependent = bool(_DATA_DEPENDENT & set(getattr(node.target, "tags", ())))
    if node.op != "call_function" or is_data_dependent or joint.is_impure(node):
        return False
    if is_number(node) or node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    # Operators without one run graphs of their own.
    if schema is None or schema.is_mutable:
        return False
    return any(not is_number(read) for read in node.all_input_nodes)


def _key(argument: Any) -> Hashable:
    """Equal for arguments of the same type and value: 1 is not 1.0, and 0.0 is not -0.0."""
    if isinstance(argument, fx.Node):
        return argument
    if isinstance(argument, tuple | list):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    if isinstance(argument, slice):
        return (slice, _key((argument.start, argument.stop, argument.step)))
    return (type(argument), repr(argument))
