"""Keeps the gradient of an embedding's padding row at zero, as torch does.

Without the torch extensions embeddings are exported as Gather, which knows no `padding_idx`: the row would get a
gradient from every padded position that the loss sees, and train away.
"""

from typing import Any

import numpy
import onnx
import torch

_ROOT = "/_original_module/"
_ELEMENTS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
}


def keep_padding_rows(graph: Any, module: torch.nn.Module) -> int:
    """Put a mask ahead of every GatherGrad of an embedding with a padding row; in place.

    Args:
        graph: an `onnx.GraphProto` of the training graph.
        module: the model that it was exported from; its nodes are named after the submodules.

    Returns:
        How many there were.
    """
    embeddings = {
        name: submodule
        for name, submodule in module.named_modules(remove_duplicate=False)
        if isinstance(submodule, torch.nn.Embedding) and submodule.padding_idx is not None
    }
    mended = 0
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "GatherGrad":
            continue
        scope = node.name.partition("_Grad/")[0].rpartition("/")[0]
        embedding = embeddings.get(scope.removeprefix(_ROOT).replace("/", "."))
        if embedding is not None:
            _mask(graph, position, embedding)
            mended += 1
    return mended


def _mask(graph: Any, position: int, embedding: torch.nn.Embedding) -> None:
    node = graph.node[position]
    _, indices, gradient = node.input
    name = f"{node.name}/padding"
    kept = numpy.ones((embedding.num_embeddings, 1), numpy.float32)
    kept[embedding.padding_idx] = 0
    graph.initializer.append(onnx.numpy_helper.from_array(kept, f"{name}_kept"))
    node.input[2] = f"{name}_masked"
    made = (
        ("Gather", [f"{name}_kept", indices], f"{name}_rows", {}),
        ("Cast", [f"{name}_rows"], f"{name}_mask", {"to": _ELEMENTS[embedding.weight.dtype]}),
        ("Mul", [gradient, f"{name}_mask"], f"{name}_masked", {}),
    )
    for offset, (operator, inputs, output, attributes) in enumerate(made):
        new = onnx.helper.make_node(operator, inputs, [output], f"{name}/{operator}", **attributes)
        graph.node.insert(position + offset, new)
