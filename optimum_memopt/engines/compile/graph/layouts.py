"""The order in memory of the gradients that pass between graphs. Pure.

AOTAutograd traces a backward with each gradient in the memory format of the output that it belongs to, and copies one
that comes in another when it runs (`coerce_to_expected_memory_format` in `torch/_functorch/_aot_autograd/
runtime_wrappers.py`, 2.12): the position bias that a layer of T5 hands on is in the order of `channels_last`, its
gradient is contiguous.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import is_tensor, tensor_value
from optimum_memopt.engines.compile.torch_compat import fx_graph

# Dimensions in their order in memory, the outermost first; those of one row are left out.
Layout = tuple[int, ...]


@dataclass(frozen=True)
class Layouts:
    """Memory layouts of the gradients that a backward takes and returns, by position; without an entry: unknown.

    Attributes:
        tangents: expected, by the output that each belongs to.
        gradients: returned, by the input that each belongs to.
    """

    tangents: Mapping[int | None, Layout] = field(default_factory=dict)
    gradients: Mapping[int | None, Layout] = field(default_factory=dict)

    def needs_copy(self, position: int | None, given: Layout | None) -> bool:
        """Returns whether a gradient of this layout is copied before the backward takes it for this output."""
        expected = self.tangents.get(position)
        return None not in (expected, given) and expected != given


def layouts_of(tangents: Iterable[fx.Node], gradients: Iterable[tuple[int | None, object]]) -> Layouts:
    """Returns the layouts of a graph's gradients.

    Args:
        tangents: placeholders of the backward.
        gradients: outputs of the backward with the positions of their inputs, parameters left out: no graph takes
            theirs.
    """
    expected = ((fx_graph.tangent_position(node), node) for node in tangents)
    returned = ((position, node) for position, node in gradients if isinstance(node, fx.Node) and is_tensor(node))
    return Layouts(_by_position(expected), _by_position(returned))


def _by_position(nodes: Iterable[tuple[int | None, fx.Node]]) -> dict[int | None, Layout]:
    return {position: _layout(node) for position, node in nodes if position is not None}


def _layout(node: fx.Node) -> Layout:
    tensor = tensor_value(node)
    # The stride of a dimension of one row says nothing.
    return tuple(dimension for dimension in fx_graph.memory_order(tensor) if not _is_one(tensor.shape[dimension]))


def _is_one(size: int | torch.SymInt) -> bool:
    # Comparing a symbol would be a guard.
    return isinstance(size, int) and size == 1
