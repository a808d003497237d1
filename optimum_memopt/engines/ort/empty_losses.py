"""Makes the mean loss of a batch without labels NaN, as in PyTorch.

ONNX Runtime's cross entropies (1.19.2) return 0 for the mean over no rows. The gradients are zero in both.
"""

from typing import Any

import numpy
import onnx

from optimum_memopt.engines.ort.graph_edits import NewNodes, element_type
from optimum_memopt.engines.ort.index_checks import LOSSES, ignored_name

_TYPES: dict[int, Any] = {onnx.TensorProto.FLOAT16: numpy.float16, onnx.TensorProto.DOUBLE: numpy.float64}


def nan_mean_without_labels(graph: Any) -> int:
    """Make every cross entropy with reduction "mean" return NaN when all its labels are ignored, in place.

    Args:
        graph: an `onnx.GraphProto` of the training graph.

    Returns:
        The number of changed nodes.
    """
    means = [(position, node) for position, node in enumerate(graph.node) if node.op_type in LOSSES and _is_mean(node)]
    for position, node in reversed(means):
        new = NewNodes(graph, f"{node.name}/no_labels")
        labels = new.add("Cast", [node.input[1]], "labels", to=onnx.TensorProto.INT64)
        if not (ignored := ignored_name(graph, node, new)):
            continue
        counts = new.add("Not", [new.add("Equal", [labels, ignored], "is_ignored")], "counts")
        counts = new.add("Cast", [counts], "counts_number", to=onnx.TensorProto.INT64)
        counts = new.add("Reshape", [counts, new.constant("flat", [-1])], "counts_list")
        counts = new.add("Concat", [counts, new.constant("none", [0])], "all_counts", axis=0)
        any_label = new.add("ReduceMax", [counts], "any_number", keepdims=0)
        any_label = new.add("Cast", [any_label], "any", to=onnx.TensorProto.BOOL)
        loss, node.output[0] = node.output[0], f"{node.name}/no_labels/zero_mean"
        dtype = _TYPES.get(element_type(graph, loss, onnx.TensorProto.FLOAT), numpy.float32)
        new.add("Where", [any_label, node.output[0], new.constant("nan", numpy.nan, dtype)], "mean")
        new.rename_last_output(loss)
        new.insert(position + 1)
    return len(means)


def _is_mean(node: Any) -> bool:
    reduction = next((attribute.s for attribute in node.attribute if attribute.name == "reduction"), b"mean")
    return reduction == b"mean"
