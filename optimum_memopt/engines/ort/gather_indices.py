"""Makes expanded indices of a gather anew for its gradient, instead of stashing them.

`x.gather(-1, index.expand(…))` costs torch nothing: an expanded tensor is a view. ONNX Runtime writes it out, and the
gradient of the gather reads it, so that it is stashed as int64 at full size: in DeBERTa-v2 two tensors of
(batch * heads, length, length) a layer, a quarter of all that a step holds (docs/ort_claims.md). The memory optimizer
has no row for them: it traces the Expand back to a Clip, which is not among the operators that it recomputes
(onnxruntime 1.19.2, orttraining/core/optimizer/memory_optimizer/recompute_analysis.cc).
"""

from typing import Any

import onnx


def expand_indices_again(graph: Any) -> int:
    """Let every GatherElementsGrad read an Expand of its own, which can only run in the backward; in place.

    The gradient that flows in has the shape of the indices (ONNX, GatherElements), so that the new Expand takes its
    shape from there. Numbers stay the same to the bit.

    Args:
        graph: an `onnx.GraphProto` of the training graph.

    Returns:
        How many there were.
    """
    expanded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Expand"}
    found = [
        (position, node)
        for position, node in enumerate(graph.node)
        if node.op_type == "GatherElementsGrad" and node.input[2] in expanded
    ]
    for position, node in reversed(found):
        gradient, _, indices = node.input
        shape, again = f"{node.name}/indices_shape", f"{node.name}/indices"
        node.input[2] = again
        graph.node.insert(
            position, onnx.helper.make_node("Expand", [expanded[indices], shape], [again], f"{again}/Expand")
        )
        graph.node.insert(position, onnx.helper.make_node("Shape", [gradient], [shape], f"{again}/Shape"))
    return len(found)
