"""Memory layouts of the gradients that pass between graphs. Pure.

AOTAutograd traces a backward with each gradient in the memory format of its output, and at run time copies a gradient
that has another one (`coerce_to_expected_memory_format` in `torch/_functorch/_aot_autograd/runtime_wrappers.py`,
2.12): the position bias that a layer of T5 passes on is in `channels_last` order, its gradient is contiguous.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_tensor, tensor_value
from optimum_memopt.engines.torch_compat import fx_graph

# Dimensions in memory order, outermost first; dimensions of size 1 are left out.
Layout = tuple[int, ...]


@dataclass(frozen=True)
class Layouts:
    """Memory layouts of the gradients that a backward takes and returns, by position; without an entry: unknown.

    Attributes:
        tangents: expected layouts, by the position of the gradient's output.
        gradients: returned layouts, by the position of the gradient's input.
    """

    tangents: Mapping[int | None, Layout] = field(default_factory=dict)
    gradients: Mapping[int | None, Layout] = field(default_factory=dict)

    def needs_copy(self, position: int | None, given: Layout | None) -> bool:
        """True if the backward copies a gradient that has this layout and belongs to this output."""
        expected = self.tangents.get(position)
        return None not in (expected, given) and expected != given


def layouts_of(tangents: Iterable[fx.Node], gradients: Iterable[tuple[int | None, object]]) -> Layouts:
    """Returns the layouts of a graph's gradients.

    Args:
        tangents: placeholders of the backward.
        gradients: outputs of the backward with the positions of their inputs, without parameters, whose gradients no
            graph takes.
    """
    expected = ((fx_graph.tangent_position(node), node) for node in tangents)
    returned = ((position, node) for position, node in gradients if isinstance(node, fx.Node) and is_tensor(node))
    return Layouts(_by_position(expected), _by_position(returned))


def _by_position(nodes: Iterable[tuple[int | None, fx.Node]]) -> dict[int | None, Layout]:
    return {position: _layout(node) for position, node in nodes if position is not None}


def _layout(node: fx.Node) -> Layout:
    tensor = tensor_value(node)
    # The stride of a dimension of size 1 is meaningless.
    return tuple(dimension for dimension in fx_graph.memory_order(tensor) if not _is_one(tensor.shape[dimension]))


def _is_one(size: int | torch.SymInt) -> bool:
    # Comparing a symbol would add a guard.
    return isinstance(size, int) and size == 1
