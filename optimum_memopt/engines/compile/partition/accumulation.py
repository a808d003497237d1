"""In-place gradient accumulation inside the backward of a graph of the whole forward.

Such a graph returns all gradients when its backward ends, and autograd accumulates them only then, so that both the
earlier and the new ones are held. Plain PyTorch accumulates and frees one gradient after the other.

1. In the joint graph each parameter's gradient goes to the operator `accumulate`, and the backward returns the
   operator's result, an empty tensor, in its place. The graph is partitioned, predicted and compiled like that.
2. In a step the operator adds the gradient to the parameter's `grad`, as autograd would, and the backward returns
   None.
3. Where autograd would do something else, the backward returns the gradient: in the first micro-batch, which has no
   earlier gradients, for a parameter with hooks, and in `torch.autograd.grad`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimum_memopt.engines.compile.graph.joint import JointGraph, is_tensor, tensor_value
from optimum_memopt.engines.torch_compat import autograd, dynamo, fx_graph
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY

# Not a `custom_op`, whose wrappers take longer than the addition of a small gradient.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("accumulate(Tensor gradient, int place) -> Tensor", tags=dynamo.CUDAGRAPH_UNSAFE)
_running = threading.local()


@torch.library.impl(f"{LIBRARY}::accumulate", "CompositeExplicitAutograd")
def _accumulate(gradient: torch.Tensor, place: int) -> torch.Tensor:
    """Accumulate a gradient, or keep it as a result of the running backward; returns an empty tensor.

    Args:
        place: index of the gradient among the backward's results.
    """
    backward: _Backward | None = getattr(_running, "backward", None)
    if backward is not None:
        backward.accumulate(gradient, place)
    return gradient.new_empty(0)


@torch.library.register_fake(f"{LIBRARY}::accumulate")
def _(gradient: torch.Tensor, place: int) -> torch.Tensor:
    return gradient.new_empty(0)


@dataclass
class _Backward:
    """A running backward.

    Attributes:
        leaves: the parameters whose gradients may be accumulated in place, by the index of their gradient.
        reuses: the backward may reuse a gradient's memory after the operator has run.
        returned: the gradients that the backward returns.
    """

    leaves: Mapping[int, torch.Tensor]
    reuses: bool
    returned: dict[int, torch.Tensor] = field(default_factory=dict)

    def accumulate(self, gradient: torch.Tensor, place: int) -> None:
        leaf = self.leaves.get(place)
        earlier = leaf.grad if leaf is not None else None
        if earlier is not None and autograd.adds_in_place(earlier, gradient):
            earlier += gradient
        else:
            self.returned[place] = gradient.clone() if self.reuses else fx_graph.without_base(gradient)


class InPlaceAccumulation:
    """In-place accumulation of the parameters' gradients in one graph's backward.

    Args:
        parameters: the name of each input that is a parameter, empty for the others.
        reuses: as in `_Backward`.
    """

    def __init__(self, parameters: Sequence[str], reuses: bool) -> None:
        self._parameters, self._reuses = parameters, reuses
        # The index of the parameter's edge in autograd's graph, by the index of its gradient; and the number of edges.
        self._edges: dict[int, int] = {}
        self._count = 0

    def add_to(self, joint: JointGraph) -> None:
        """Insert an `accumulate` after each parameter's gradient; the joint graph is invalid afterwards."""
        graph, results, first = joint.module.graph, list(joint.outputs), joint.num_fwd_outputs
        if not len(results) - first == len(joint.inputs) == len(self._parameters):
            return
        # autograd's graph has an edge for each tensor among the arguments.
        tensors = [place for place, node in enumerate(joint.inputs) if is_tensor(node)]
        self._count = len(tensors)
        for edge, place in enumerate(tensors):
            gradient = results[first + place]
            # Zeros depend on no gradient, and may be computed in the forward.
            if not self._parameters[place] or gradient not in joint.backward or gradient.op != "call_function":
                continue
            with graph.inserting_after(gradient):
                empty = graph.call_function(torch.ops.optimum_memopt.accumulate.default, (gradient, place))
            empty.meta = {**gradient.meta, "val": tensor_value(gradient).new_empty(0)}
            results[first + place] = empty
            self._edges[place] = edge
        graph.output_node().args = (tuple(results),)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a backward that runs the compiled one; it returns None for each gradient accumulated in place."""
        if not self._edges:
            return compiled

        def backward(args: list[Any]) -> Any:
            running = _Backward(autograd.accumulating_leaves(self._edges, self._count), self._reuses)
            before, _running.backward = getattr(_running, "backward", None), running
            try:
                results = list(compiled(args))
            finally:
                _running.backward = before
            for place in self._edges:
                results[place] = running.returned.get(place)
            return results

        return fx_graph.boxed(backward)
