"""Lets the CPU provider compute the gradient of a grouped convolution over one dimension, as one over two.

ONNX Runtime's CPU kernel of ConvGrad (1.19.2) writes past its buffer when it computes the gradient of the input of a
convolution with groups over other than two dimensions; the process ends in glibc's "free(): corrupted unsorted chunks"
(ConvBERT's separable convolutions). Over two dimensions it is right, and over one it is the same with a height of 1.
"""

from typing import Any

from optimum_memopt.engines.ort.graph_edits import NewNodes, module_scope
from optimum_memopt.engines.ort.support_checks import Unsuitable

# One dimension to two: what each list of the operator's attributes holds for the new one.
_NEUTRAL = {"kernel_shape": 1, "strides": 1, "dilations": 1}


def flatten_grouped_gradients(graph: Any) -> int:
    """Give every ConvGrad with groups over one dimension tensors of two, of which the first has the size 1; in place.

    Args:
        graph: an `onnx.GraphProto` of the training graph.

    Returns:
        How many there were.

    Raises:
        Unsuitable: one with groups over three dimensions or more.
    """
    mended = 0
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "ConvGrad":
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        rank = len(attributes["kernel_shape"].ints)
        if "group" not in attributes or attributes["group"].i == 1 or rank == 2:
            continue
        if rank > 2:
            raise Unsuitable(
                f"its gradient of a convolution with groups over {rank} dimensions writes out of bounds "
                f"({module_scope(node.name)})"
            )
        _over_two_dimensions(graph, position, attributes)
        mended += 1
    return mended


def _over_two_dimensions(graph: Any, position: int, attributes: dict[str, Any]) -> None:
    node = graph.node[position]
    for name, neutral in _NEUTRAL.items():
        if name in attributes:
            attributes[name].ints.insert(0, neutral)
    if "pads" in attributes:
        before, after = attributes["pads"].ints
        attributes["pads"].ints[:] = [0, before, 0, after]
    wide, narrow = NewNodes(graph, f"{node.name}/wide"), NewNodes(graph, f"{node.name}/narrow")
    # Zeros are sizes that stay.
    wide_shape, narrow_shape = wide.constant("shape", [0, 0, 1, -1]), narrow.constant("shape", [0, 0, -1])
    for index, name in enumerate(node.input):
        node.input[index] = wide.add("Reshape", [name, wide_shape], f"input_{index}")
    # Gradients of input and weight; the bias's has one dimension in any case.
    for index, name in enumerate(node.output[:2]):
        if name:
            node.output[index] = f"{node.name}/wide/output_{index}"
            narrow.add("Reshape", [node.output[index], narrow_shape], f"output_{index}")
            narrow.rename_last_output(name)
    narrow.insert(position + 1)
    wide.insert(position)
