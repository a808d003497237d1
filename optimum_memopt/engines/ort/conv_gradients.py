"""Computes the gradient of a grouped 1D convolution as that of a 2D convolution.

ONNX Runtime's CPU kernel of ConvGrad (1.19.2) writes past its buffer in the input gradient of grouped convolutions
that are not 2D; the process aborts with glibc's "free(): corrupted unsorted chunks" (ConvBERT's separable
convolutions). The 2D case is correct, and a 1D convolution is a 2D one with height 1.
"""

from typing import Any

from optimum_memopt.engines.ort.graph_edits import NewNodes, module_scope
from optimum_memopt.engines.ort.support_checks import UnsupportedByOrt

# Values of the operator's list attributes for the added dimension.
_NEUTRAL = {"kernel_shape": 1, "strides": 1, "dilations": 1}


def unsqueeze_grouped_conv1d_gradients(graph: Any) -> int:
    """Add a dimension of size 1 to the tensors of every grouped 1D ConvGrad, in place.

    Args:
        graph: an `onnx.GraphProto` of the training graph.

    Returns:
        The number of changed nodes.

    Raises:
        UnsupportedByOrt: a grouped ConvGrad with three dimensions or more.
    """
    count = 0
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "ConvGrad":
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        rank = len(attributes["kernel_shape"].ints)
        if "group" not in attributes or attributes["group"].i == 1 or rank == 2:
            continue
        if rank > 2:
            raise UnsupportedByOrt(
                f"its gradient of a grouped convolution over {rank} dimensions writes out of bounds "
                f"({module_scope(node.name)})"
            )
        _unsqueeze(graph, position, attributes)
        count += 1
    return count


def _unsqueeze(graph: Any, position: int, attributes: dict[str, Any]) -> None:
    node = graph.node[position]
    for name, neutral in _NEUTRAL.items():
        if name in attributes:
            attributes[name].ints.insert(0, neutral)
    if "pads" in attributes:
        before, after = attributes["pads"].ints
        attributes["pads"].ints[:] = [0, before, 0, after]
    before_node = NewNodes(graph, f"{node.name}/unsqueeze")
    after_node = NewNodes(graph, f"{node.name}/squeeze")
    # In a Reshape, 0 copies the size of the input.
    shape_2d, shape_1d = before_node.constant("shape", [0, 0, 1, -1]), after_node.constant("shape", [0, 0, -1])
    for index, name in enumerate(node.input):
        node.input[index] = before_node.add("Reshape", [name, shape_2d], f"input_{index}")
    # Gradients of input and weight; the bias gradient is 1D in both cases.
    for index, name in enumerate(node.output[:2]):
        if name:
            node.output[index] = f"{node.name}/unsqueeze/output_{index}"
            after_node.add("Reshape", [node.output[index], shape_1d], f"output_{index}")
            after_node.rename_last_output(name)
    after_node.insert(position + 1)
    before_node.insert(position)
