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

# The dimensions of a tensor from the outermost in memory to the innermost, without those of one row.
Layout = tuple[int, ...]


@dataclass(frozen=True)
class Layouts:
    """The layouts of gradients; what is not known has none.

    Attributes:
        tangents: that the backward takes, by the position of the output that each belongs to.
        gradients: that it returns, by the position of the input that each belongs to.
    """

    tangents: Mapping[int, Layout] = field(default_factory=dict)
    gradients: Mapping[int, Layout] = field(default_factory=dict)

    def copied(self, position: int | None, given: Layout | None) -> bool:
        """True where a gradient of this layout is copied before the backward of the output at this position runs."""
        expected = None if position is None else self.tangents.get(position)
        return None not in (expected, given) and expected != given


def layouts_of(tangents: Iterable[fx.Node], gradients: Iterable[tuple[int | None, object]]) -> Layouts:
    """Reads them from a graph.

    Args:
        tangents: placeholders of the backward.
        gradients: what it returns, each with the position of its input.
    """
    expected = ((fx_graph.tangent_position(node), _layout(node)) for node in tangents)
    returned = (
        (position, _layout(node)) for position, node in gradients if isinstance(node, fx.Node) and is_tensor(node)
    )
    return Layouts(
        *({position: layout for position, layout in pairs if position is not None} for pairs in (expected, returned))
    )


def _layout(node: fx.Node) -> Layout:
    tensor = tensor_value(node)
    # The stride of a dimension of one row says nothing.
    return tuple(dimension for dimension in fx_graph.memory_order(tensor) if not _is_one(tensor.shape[dimension]))


def _is_one(size: int | torch.SymInt) -> bool:
    # Comparing a symbol would be a guard.
    return isinstance(size, int) and size == 1
