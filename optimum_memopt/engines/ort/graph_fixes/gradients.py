"""Gradients of a training graph that ONNX Runtime 1.19.2 computes wrongly, or at the price of memory; in place.

The graph is an `onnx.GraphProto`, whose nodes are named after the submodules that they were exported from.
"""

from typing import Any

import numpy
import onnx
import torch

from optimum_memopt.engines.ort.graph_fixes.training_graph import NewNodes, embedding_of, module_scope
from optimum_memopt.engines.ort.support.checks import UnsupportedByOrt

_ELEMENTS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
}


def mask_padding_gradients(graph: Any, module: torch.nn.Module) -> None:
    """Keep the gradient of an embedding's padding row at zero, as torch does.

    Without the torch extensions embeddings are exported as Gather, which has no `padding_idx`: the row would get a
    gradient from every padded position that the loss reads, and would be trained.
    """
    embeddings = {
        name: submodule
        for name, submodule in module.named_modules(remove_duplicate=False)
        if isinstance(submodule, torch.nn.Embedding) and submodule.padding_idx is not None
    }
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "GatherGrad" or (embedding := embedding_of(node.name, embeddings)) is None:
            continue
        _, indices, gradient = node.input
        new = NewNodes(graph, f"{node.name}/padding")
        row_mask = numpy.ones((embedding.num_embeddings, 1), numpy.float32)
        row_mask[embedding.padding_idx] = 0
        rows = new.add("Gather", [new.constant("row_mask", row_mask, numpy.float32), indices], "rows")
        mask = new.add("Cast", [rows], "mask", to=_ELEMENTS[embedding.weight.dtype])
        node.input[2] = new.add("Mul", [gradient, mask], "masked")
        new.insert(position)


def expand_indices_in_backward(graph: Any) -> None:
    """Recompute the expanded indices of a gather in the backward, instead of stashing them.

    `x.gather(-1, index.expand(…))` needs no memory in torch, where an expanded tensor is a view. ONNX Runtime
    materializes it, and the gather's gradient reads it, so it is stashed as int64 at full size: in DeBERTa-v2 two
    tensors of shape (batch * heads, length, length) per layer, a quarter of all that a step holds
    (docs/ort_claims.md). The memory optimizer has no row for them: it traces the Expand back to a Clip, which it
    cannot recompute (orttraining/core/optimizer/memory_optimizer/recompute_analysis.cc).

    The incoming gradient has the shape of the indices (ONNX, GatherElements), so the new Expand reads its shape. The
    result is bitwise the same.
    """
    expanded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Expand"}
    for position, node in reversed(list(enumerate(graph.node))):
        if node.op_type == "GatherElementsGrad" and node.input[2] in expanded:
            gradient, _, indices = node.input
            new = NewNodes(graph, node.name)
            shape = new.add("Shape", [gradient], "indices_shape")
            node.input[2] = new.add("Expand", [expanded[indices], shape], "indices")
            new.insert(position)


def unsqueeze_grouped_conv1d_gradients(graph: Any) -> None:
    """Compute the gradient of a grouped 1D convolution as that of a 2D convolution of height 1.

    ONNX Runtime's CPU kernel of ConvGrad writes past its buffer in the input gradient of grouped convolutions that are
    not 2D; the process aborts with glibc's "free(): corrupted unsorted chunks" (ConvBERT's separable convolutions).

    Raises:
        UnsupportedByOrt: a grouped ConvGrad with three dimensions or more.
    """
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
        for name in ("kernel_shape", "strides", "dilations"):
            if name in attributes:
                attributes[name].ints.insert(0, 1)
        if "pads" in attributes:
            before, after = attributes["pads"].ints
            attributes["pads"].ints[:] = [0, before, 0, after]
        _unsqueeze(graph, position)


def _unsqueeze(graph: Any, position: int) -> None:
    """Add a dimension to the inputs of the node and remove it from its outputs."""
    node = graph.node[position]
    before, after = NewNodes(graph, f"{node.name}/unsqueeze"), NewNodes(graph, f"{node.name}/squeeze")
    # In a Reshape, 0 copies the size of the input.
    shape_2d, shape_1d = before.constant("shape", [0, 0, 1, -1]), after.constant("shape", [0, 0, -1])
    for index, name in enumerate(node.input):
        node.input[index] = before.add("Reshape", [name, shape_2d], f"input_{index}")
    # Gradients of input and weight; the bias gradient is 1D in both cases.
    for index, name in enumerate(node.output[:2]):
        if name:
            node.output[index] = f"{node.name}/unsqueeze/output_{index}"
            after.add("Reshape", [node.output[index], shape_1d], f"output_{index}")
            after.rename_last_output(name)
    after.insert(position + 1)
    before.insert(position)
