"""Keeps the gradient of an embedding's padding row at zero, as torch does.

Without the torch extensions embeddings are exported as Gather, which has no `padding_idx`: the row would get a
gradient from every padded position that the loss reads, and would be trained.
"""

from typing import Any

import numpy
import onnx
import torch

from optimum_memopt.engines.ort.graph_edits import NewNodes, embedding_of

_ELEMENTS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
}


def mask_padding_gradients(graph: Any, module: torch.nn.Module) -> int:
    """Mask the incoming gradient of every GatherGrad of an embedding with a padding row, in place.

    Args:
        graph: an `onnx.GraphProto` of the training graph.
        module: the model that it was exported from; its nodes are named after the submodules.

    Returns:
        The number of changed nodes.
    """
    embeddings = {
        name: submodule
        for name, submodule in module.named_modules(remove_duplicate=False)
        if isinstance(submodule, torch.nn.Embedding) and submodule.padding_idx is not None
    }
    count = 0
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "GatherGrad":
            continue
        embedding = embedding_of(node.name, embeddings)
        if embedding is not None:
            _mask(graph, position, embedding)
            count += 1
    return count


def _mask(graph: Any, position: int, embedding: torch.nn.Embedding) -> None:
    node = graph.node[position]
    _, indices, gradient = node.input
    new = NewNodes(graph, f"{node.name}/padding")
    row_mask = numpy.ones((embedding.num_embeddings, 1), numpy.float32)
    row_mask[embedding.padding_idx] = 0
    rows = new.add("Gather", [new.constant("row_mask", row_mask, numpy.float32), indices], "rows")
    mask = new.add("Cast", [rows], "mask", to=_ELEMENTS[embedding.weight.dtype])
    node.input[2] = new.add("Mul", [gradient, mask], "masked")
    new.insert(position)
