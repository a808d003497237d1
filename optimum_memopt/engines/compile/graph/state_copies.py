"""Copies of a model's state in a joint graph, for backwards that recompute from it.

State means buffers, frozen parameters and tensor attributes of modules: tensors that a graph reads but computes no
gradient for. A recompute reads them when the backward runs, while plain PyTorch has saved the results of the forward.
In between, code may have written to them: a memory bank, an expert bias that a hook updates, a teacher that follows
its student. So the forward reads a copy, which is saved, and everything computed from the copy can be recomputed.

A copy is worth its memory if the state is small, or is known to change. Frozen weights are neither: they are checked
for changes at run time (`capture/moved_state.py`). State that the graph itself writes to needs no copy: the operators
that read it are saved (`JointGraph.is_impure`).
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import (
    STATE_COPY,
    JointGraph,
    first_input,
    is_tensor,
    root,
    tensor_value,
)
from optimum_memopt.engines.torch_compat import fx_graph

# Bytes of a buffer above which it is copied only if it is known to change.
_MOST_BYTES = 2**18


@dataclass(frozen=True)
class StateArguments:
    """The arguments of a graph that are state, by position.

    Attributes:
        parameters: parameters, frozen or trainable.
        buffers: buffers and tensor attributes.
        moved: parameters and buffers that have changed between a forward and its backward.
    """

    parameters: frozenset[int] = frozenset()
    buffers: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()

    def nodes(self, joint: JointGraph, places: Collection[int]) -> frozenset[fx.Node]:
        """Returns the inputs of a joint graph at these positions that are tensors without a gradient."""
        given = (node for node in joint.inputs if is_tensor(node) and joint.gradients.get(node) is None)
        return frozenset(node for node in given if fx_graph.input_position(node) in places)


def copy_state(joint: JointGraph, state: StateArguments) -> None:
    """Make the forward read copies of small buffers and of all state that changes. Invalidates everything that was
    read from the graph before.

    A `clone` that the model itself makes of state, or of an input that it writes to, counts as such a copy.
    """
    written, copied = joint.mutated_inputs, state.nodes(joint, state.moved)
    copied |= frozenset(node for node in state.nodes(joint, state.buffers) if _is_small(node))
    all_state = state.nodes(joint, state.parameters | state.buffers)
    graph = joint.module.graph
    first = next(node for node in joint.nodes if node.op != "placeholder")
    for node in joint.inputs:
        readers = [user for user in node.users if user.op == "call_function" and user not in joint.backward]
        snapshots = [user for user in readers if node in written | all_state and _is_snapshot(user)]
        for user in snapshots:
            user.meta[STATE_COPY] = True
        readers = [user for user in readers if user not in snapshots]
        if node not in copied or node in written or not readers:
            continue
        with graph.inserting_before(first):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        value = tensor_value(node)
        with value.fake_mode:
            copy.meta.update(val=value.clone(), partitioner_tag="is_forward")
        copy.meta[STATE_COPY] = True
        for user in readers:
            user.replace_input_with(node, copy)


def remove_unsaved_copies(forward: fx.GraphModule, copies: Collection[str]) -> None:
    """Make a forward graph read the state itself if the backward does not need the copy; changes the graph.

    Args:
        copies: names of the copies in the joint graph.
    """
    (output,) = forward.graph.find_nodes(op="output")
    for node in forward.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        if node.name in copies and output not in node.users:
            node.replace_all_uses_with(first_input(node))
            forward.graph.erase_node(node)


def save_apart_from_inputs(forward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Save copies of values that a forward graph also writes to its inputs, for inductor; changes the graph.

    inductor computes such a value in the input itself, and saves the input for the backward: the next forward writes
    to it, and so does the backward, to which it is donated (2.9 to 2.13: `buffer[:3] = x`, then `buffer` is read).
    """
    written = {
        root(node.args[1])
        for node in forward.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    for place, node in enumerate(results[num_fwd_outputs:], num_fwd_outputs):
        if not isinstance(node, fx.Node) or root(node) not in written or root(node).op == "placeholder":
            continue
        with forward.graph.inserting_before(output):
            # An exact copy; a `clone` would be removed.
            is_bool = tensor_value(node).dtype == torch.bool
            same = (torch.ops.aten.bitwise_or.Scalar, False) if is_bool else (torch.ops.aten.mul.Tensor, 1)
            results[place] = forward.graph.call_function(same[0], (node, same[1]))
        results[place].meta.update(node.meta)
        value = tensor_value(node)
        with value.fake_mode:
            results[place].meta["val"] = value.clone()
    output.args = (tuple(results),)


def _is_small(node: fx.Node) -> bool:
    tensor = tensor_value(node)
    is_static = all(isinstance(size, int) for size in tensor.shape)
    return is_static and tensor.numel() * tensor.dtype.itemsize <= _MOST_BYTES


def _is_snapshot(node: fx.Node) -> bool:
    """True for a copy with the strides of its source, which only makes sense before a later write."""
    if node.target is not torch.ops.aten.clone.default or not is_tensor(node):
        return False
    return tensor_value(node).stride() == tensor_value(first_input(node)).stride()
