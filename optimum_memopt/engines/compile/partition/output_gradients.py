"""Gradients of the outputs other than the loss, which most training loops never compute.

A model returns its loss and its logits, and a loop calls backward on the loss. AOTAutograd traces one backward for
gradients of all outputs, and autograd fills missing ones with zeros: a tensor as large as the logits, and another one
for its sum with the gradient from the loss. Plain PyTorch allocates neither.

1. In the joint graph such a gradient is read only by a sum. The sum is replaced by its other summand, and the
   gradient becomes a tensor without elements; the graph is analyzed, partitioned, predicted and compiled like that.
2. In a step `set_materialize_grads` is off, so that autograd allocates no zeros; the backward reads an empty tensor.
3. If the gradient is given, the loop uses that output. The backward then runs operator by operator, with the sum in
   its place, and the next forward is traced with gradients of all outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_barrier, is_tensor, tensor_value
from optimum_memopt.engines.torch_compat import fx_graph

_SUM = torch.ops.aten.add.Tensor


@dataclass(frozen=True)
class _Sum:
    """A sum that was removed from a joint graph, by the names of nodes.

    Attributes:
        gradient: the placeholder of the output's gradient.
        other: the other summand; empty: nothing reads the gradient.
        readers: the operators that read the sum.
    """

    gradient: str
    other: str = ""
    readers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Zeros:
    """The zeros for a missing gradient: an empty tensor if its sum was removed, a scalar for a loss.

    Attributes:
        are_left_out: the gradient's sum was removed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    are_left_out: bool


class OutputGradients:
    """Removes the gradients of outputs other than the loss from one graph's backward, and adds them if they are given.

    Attributes:
        are_read: a backward was given one of these gradients.
    """

    def __init__(self) -> None:
        self.are_read = False
        self._sums: tuple[_Sum, ...] = ()
        # Keyed by position among the backward's arguments.
        self._zeros: dict[int, _Zeros] = {}
        self._with_sums: fx.GraphModule | None = None

    @property
    def are_left_out(self) -> bool:
        """True if the compiled backward takes None for each gradient but a loss's."""
        return bool(self._sums)

    def leave_out(self, joint: fx.Graph) -> None:
        """Remove the sums with these gradients from a joint graph that also returns losses."""
        tangents = [node for node in joint.nodes if fx_graph.is_tangent(node)]
        of_outputs = [node for node in tangents if not _is_of_loss(node)]
        sums = list(map(_sum_of, of_outputs))
        if len(of_outputs) == len(tangents) or None in sums:
            return
        for node in of_outputs:
            for total in tuple(node.users):
                total.replace_all_uses_with(next(each for each in total.all_input_nodes if each is not node))
                joint.erase_node(total)
            node.meta["val"] = tensor_value(node).new_empty(0)
        self._sums = tuple(filter(None, sums))

    def keep(self, backward: fx.GraphModule) -> None:
        """Keep a copy of a partitioned backward with the sums added, since the compiler may change the original.

        Raises:
            RuntimeError: the backward does not match the joint graph.
        """
        if not self._sums:
            return
        graph = fx.Graph()
        graph.output(graph.graph_copy(backward.graph, {}))
        nodes = {node.name: node for node in graph.nodes}
        gradients = {left_out.gradient for left_out in self._sums}
        for place, node in enumerate(graph.find_nodes(op="placeholder")):
            if fx_graph.is_tangent(node):
                like = tensor_value(node)
                self._zeros[place] = _Zeros(tuple(like.shape), like.dtype, like.device, node.name in gradients)
        for left_out in filter(lambda each: each.other, self._sums):
            other = nodes.get(left_out.other)
            # Barriers of recompute also read the summand, see `strategies/recompute.py`.
            if other is None or {user.name for user in other.users if not is_barrier(user)} != left_out.readers:
                raise RuntimeError(f"{left_out.other} is read by others than the gradient of an output was")
            with graph.inserting_after(other):
                total = graph.call_function(_plus, (other, nodes[left_out.gradient]))
            other.replace_all_uses_with(total, delete_user_cb=lambda user, total=total: user is not total)
        for node in graph.nodes:
            # The traced values are no longer needed.
            node.meta = {}
        self._with_sums = fx.GraphModule(backward, graph)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a backward that runs the compiled one, or the one with the sums if a gradient is given."""
        if self._with_sums is None:
            return compiled
        with_sums, run = self._with_sums, None

        def backward(args: list[Any]) -> Any:
            nonlocal run
            is_read = False
            for place, zeros in self._zeros.items():
                if args[place] is None:
                    args[place] = torch.zeros(zeros.shape, dtype=zeros.dtype, device=zeros.device)
                elif zeros.are_left_out:
                    is_read = True
            if not is_read:
                return compiled(args)
            self.are_read = True
            run = run or fx_graph.run_backward_operators(with_sums, ())
            return run(args)

        return fx_graph.boxed(backward)


def _is_of_loss(gradient: fx.Node) -> bool:
    return is_tensor(gradient) and not tensor_value(gradient).dim()


def _sum_of(gradient: fx.Node) -> _Sum | None:
    """Returns the sum that is the only reader of an output's gradient; None if something else reads it."""
    if not is_tensor(gradient):
        return None
    if not gradient.users:
        return _Sum(gradient.name)
    (total, *others) = gradient.users
    summands = [each for each in total.args if each is not gradient]
    if others or total.target is not _SUM or total.kwargs or len(total.args) != 2 or len(summands) != 1:
        return None
    (other,) = summands
    if not isinstance(other, fx.Node) or not is_tensor(other) or len(other.users) != 1:
        return None
    ours, theirs = tensor_value(gradient), tensor_value(other)
    is_alike = (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    return _Sum(gradient.name, other.name, frozenset(user.name for user in total.users)) if is_alike else None


def _plus(gradient: torch.Tensor, of_output: torch.Tensor) -> torch.Tensor:
    return gradient + of_output if of_output.numel() else gradient
