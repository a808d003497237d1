"""Recomputes the expanded indices of a gather in the backward, instead of stashing them.

`x.gather(-1, index.expand(…))` needs no memory in torch, where an expanded tensor is a view. ONNX Runtime
materializes it, and the gather's gradient reads it, so it is stashed as int64 at full size: in DeBERTa-v2 two tensors
of shape (batch * heads, length, length) per layer, a quarter of all that a step holds (docs/ort_claims.md). The memory
optimizer has no row for them: it traces the Expand back to a Clip, which it cannot recompute (onnxruntime 1.19.2,
orttraining/core/optimizer/memory_optimizer/recompute_analysis.cc).
"""

from typing import Any

import onnx


def expand_indices_in_backward(graph: Any) -> int:
    """Give every GatherElementsGrad its own Expand that runs in the backward, in place.

    The incoming gradient has the shape of the indices (ONNX, GatherElements), so the new Expand reads its shape. The
    result is bitwise the same.

    Args:
        graph: an `onnx.GraphProto` of the training graph.

    Returns:
        The number of changed nodes.
    """
    expanded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Expand"}
    gradients = [
        (position, node)
        for position, node in enumerate(graph.node)
        if node.op_type == "GatherElementsGrad" and node.input[2] in expanded
    ]
    for position, node in reversed(gradients):
        gradient, _, indices = node.input
        shape, recomputed = f"{node.name}/indices_shape", f"{node.name}/indices"
        node.input[2] = recomputed
        graph.node.insert(
            position, onnx.helper.make_node("Expand", [expanded[indices], shape], [recomputed], f"{recomputed}/Expand")
        )
        graph.node.insert(position, onnx.helper.make_node("Shape", [gradient], [shape], f"{recomputed}/Shape"))
    return len(gradients)
