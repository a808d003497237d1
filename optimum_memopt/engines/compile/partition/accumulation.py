"""Gradients that a backward adds to those of earlier micro-batches itself, each as soon as it is complete.

A graph of the whole forward returns all gradients when its backward ends, and autograd adds them to the earlier ones
only then, so that both are held. Plain PyTorch adds and frees one gradient after the other.

1. In the joint graph each parameter's gradient goes to the operator `add_gradient`, and the backward returns the
   operator's result, an empty tensor, in its place. The graph is partitioned, predicted and compiled like that.
2. In a step the operator adds the gradient to the parameter's `grad`, as autograd would, and the backward returns
   None.
3. Where autograd would do something else, the backward returns the gradient: in the first micro-batch, which has no
   earlier gradients, for a parameter with hooks, and in `torch.autograd.grad`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimum_memopt.engines.compile.graph.joint import JointGraph, is_tensor, tensor_value
from optimum_memopt.engines.compile.torch_compat import autograd, dynamo, fx_graph
from optimum_memopt.engines.compile.torch_compat.fx_graph import LIBRARY

# Not a `custom_op`, whose wrappers take longer than the addition of a small gradient.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("add_gradient(Tensor gradient, int place) -> Tensor", tags=dynamo.CUDAGRAPH_UNSAFE)
_running = threading.local()


@torch.library.impl(f"{LIBRARY}::add_gradient", "CompositeExplicitAutograd")
def _add_gradient(gradient: torch.Tensor, place: int) -> torch.Tensor:
    """Add a gradient to the earlier ones, or keep it as a result of the backward.

    Args:
        place: index of the gradient among the backward's results.
    """
    backward: _Backward | None = getattr(_running, "backward", None)
    if backward is not None:
        backward.add(gradient, place)
    return gradient.new_empty(0)


@torch.library.register_fake(f"{LIBRARY}::add_gradient")
def _(gradient: torch.Tensor, place: int) -> torch.Tensor:
    return gradient.new_empty(0)


@dataclass
class _Backward:
    """A running backward.

    Attributes:
        parameters: the parameters to whose gradients autograd would add, by the index of their gradient.
        reuses: the backward may reuse the memory of a gradient after it has passed it on.
        returned: the gradients that the backward returns.
    """

    parameters: dict[int, torch.Tensor]
    reuses: bool
    returned: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, gradient: torch.Tensor, place: int) -> None:
        parameter = self.parameters.get(place)
        earlier = parameter.grad if parameter is not None else None
        if earlier is not None and autograd.adds_in_place(earlier, gradient):
            earlier += gradient
        else:
            self.returned[place] = gradient.clone() if self.reuses else fx_graph.without_base(gradient)


class AddedGradients:
    """The parameters' gradients that one graph's backward adds itself.

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
        """Put `add_gradient` after each of these gradients; the joint graph is invalid afterwards."""
        graph, results, first = joint.module.graph, list(joint.outputs), joint.num_fwd_outputs
        if not len(results) - first == len(joint.inputs) == len(self._parameters):
            return
        # autograd's graph has an edge for each tensor among the arguments.
        edges = {
            place: edge
            for edge, place in enumerate(place for place, node in enumerate(joint.inputs) if is_tensor(node))
        }
        self._count = len(edges)
        for place, name in enumerate(self._parameters):
            gradient = results[first + place]
            # Zeros depend on no gradient, and may be computed in the forward.
            if not name or gradient not in joint.backward or gradient.op != "call_function":
                continue
            with graph.inserting_after(gradient):
                added = graph.call_function(torch.ops.optimum_memopt.add_gradient.default, (gradient, place))
            added.meta = {**gradient.meta, "val": tensor_value(gradient).new_empty(0)}
            results[first + place] = added
            self._edges[place] = edges[place]
        graph.output_node().args = (tuple(results),)

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a backward that runs the compiled one, and returns the gradients that it has not added."""
        if not self._edges:
            return compiled

        def backward(args: list[Any]) -> Any:
            leaves = autograd.leaves_that_accumulate(self._edges.values(), self._count)
            running = _Backward(
                {place: leaves[edge] for place, edge in self._edges.items() if edge in leaves}, self._reuses
            )
            before, _running.backward = getattr(_running, "backward", None), running
            try:
                results = list(compiled(args))
            finally:
                _running.backward = before
            for place in self._edges:
                results[place] = running.returned.get(place)
            return results

        return fx_graph.boxed(backward)
