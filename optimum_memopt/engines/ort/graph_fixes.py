"""Fixes ONNX Runtime 1.19.2's training graphs in place: checks labels and ids as PyTorch does, and corrects wrong or
costly gradients.

A graph is an `onnx.GraphProto`, whose nodes are named after the submodules that they were exported from.

ONNX Runtime's losses read out of bounds if a label is out of range, and its Gather counts negative ids from the end
(onnxruntime 1.19.2); torch raises IndexError for both. A check is a group of nodes before the node that would read out
of bounds, so it sees the values that this node reads: after shifts, masks and slices, and including positions that the
model computes itself. A check is a dozen operators on the integers of a batch and stashes nothing: four checks take
0.1 to 0.3 ms for 1,024 ids each, and are not measurable for 8,192 (2 cores). On CUDA each check synchronizes with the
device, because Reshape reads its shape on the host (not run: there was no GPU).
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import onnx
import torch

from optimum_memopt.engines.ort.checks import UnsupportedByOrt

# The export names nodes after their submodules, under this prefix.
ROOT = "/_original_module/"
_ELEMENTS = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float16: onnx.TensorProto.FLOAT16,
    torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE,
}
LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal"})
# Operators whose output has the values of their first input.
_SAME_VALUES = frozenset(
    {"Cast", "Concat", "ConcatTraining", "Flatten", "Identity", "Pad", "Reshape", "ShrunkenGather", "Slice", "Squeeze"}
    | {"Transpose", "Unsqueeze"}
)
_MARK = "/index_range"
# Added to a value out of range, clipped to half of this, so that the sum is positive and encodes the value.
_OFFSET = 2**40
_FAILED_CHECK = re.compile(rf"Name:'(?P<node>[^']*){_MARK}'.*requested shape:\{{(?P<coded>\d+)\}}", re.DOTALL)
# ORT's own check for ids past the end (gather.cc, gather_elements.cc), on the CPU only; it also covers nodes without
# one of our checks.
_FAILED_GATHER = re.compile(
    r"Name:'(?P<node>[^']*)'.*(?:idx|index)\D*=?\s*(?P<value>-?\d+) must be within the inclusive range "
    r"\[-(?P<size>\d+),",
    re.DOTALL,
)
# torch's errors when the model runs for the export; ORT puts them at the end of a traceback.
_FAILED_EXPORT = re.compile(
    r"(?:^|Error: )(?P<reason>index out of range in self|Target -?\d+ is out of bounds\.|"
    r"index -?\d+ is out of bounds for dimension \d+ with size \d+|"
    r"Class values must be (?:non-negative|smaller than num_classes)\.)"
)


class NewNodes:
    """Nodes and constants with a common prefix to their names, collected in topological order and inserted at once."""

    def __init__(self, graph: Any, prefix: str) -> None:
        self._graph = graph
        self._prefix = prefix
        self._nodes: list[Any] = []

    def constant(self, name: str, value: Any, dtype: Any = numpy.int64) -> str:
        """Add an initializer; returns its full name."""
        full = f"{self._prefix}/{name}"
        self._graph.initializer.append(onnx.numpy_helper.from_array(numpy.asarray(value, dtype), full))
        return full

    def add(self, operator: str, inputs: Sequence[str], output: str, label: str = "", **attributes: Any) -> str:
        """Add a node; returns the full name of its output. The node is named `label`, or after output and operator if
        that is empty."""
        full = f"{self._prefix}/{output}"
        label = label or f"{full}/{operator}"
        self._nodes.append(onnx.helper.make_node(operator, inputs, [full], label, **attributes))
        return full

    def rename_last_output(self, name: str) -> None:
        self._nodes[-1].output[0] = name

    def insert(self, position: int) -> None:
        for offset, node in enumerate(self._nodes):
            self._graph.node.insert(position + offset, node)


def _backwards(graph: Any) -> list[tuple[int, Any]]:
    """Returns positions and nodes, the last first, so that the loop over them can insert nodes."""
    return list(enumerate(graph.node))[::-1]


def _embeddings(module: torch.nn.Module) -> dict[str, torch.nn.Embedding]:
    named = module.named_modules(remove_duplicate=False)
    return {name: submodule for name, submodule in named if isinstance(submodule, torch.nn.Embedding)}


def embedding_of(node_name: str, embeddings: dict[str, torch.nn.Embedding]) -> torch.nn.Embedding | None:
    scope = module_scope(node_name)
    # From the second call of a submodule in one forward, its scope ends with a number.
    called, _, count = scope.rpartition("_")
    return embeddings.get(scope) or (embeddings.get(called) if count.isdigit() else None)


def module_scope(node_name: str) -> str:
    """Returns the name of the module that a node was exported from; for a gradient node, that of its forward node."""
    return node_name.partition("_Grad/")[0].rpartition("/")[0].removeprefix(ROOT).replace("/", ".")


def element_type(graph: Any, name: str, default: int) -> int:
    """Returns the `onnx.TensorProto` type of a value; `default` if the graph does not record it."""
    values = (*graph.value_info, *graph.input, *graph.output)
    return next((value.type.tensor_type.elem_type for value in values if value.name == name), 0) or default


@dataclass(frozen=True)
class IndexCheck:
    """One check in a graph.

    Attributes:
        what: name of the model input that holds the indices, or of the submodule that reads them.
        size: indices from 0 to `size` - 1 are allowed; None if it varies between batches.
        ignored: the loss's ignore index, which is also allowed; None if there is none, or if it varies.
    """

    what: str
    size: int | None
    ignored: int | None = None

    def error(self, value: int) -> IndexError:
        upper = f"0 to {self.size - 1}" if self.size else "0 to the number of classes minus 1"
        ignored = f" and {self.ignored}" if self.ignored is not None else ""
        return IndexError(f"index out of range: {self.what} holds {value}, allowed: {upper}{ignored}")


def mend(graph: Any, module: torch.nn.Module) -> dict[str, IndexCheck]:
    """Apply all fixes to a training graph exported from `module`; returns the checks of `check_indices`."""
    checks = check_indices(graph, module)
    nan_mean_without_labels(graph)
    mask_padding_gradients(graph, module)
    expand_indices_in_backward(graph)
    unsqueeze_grouped_conv1d_gradients(graph)
    return checks


def check_indices(graph: Any, module: torch.nn.Module) -> dict[str, IndexCheck]:
    """Add a check, in place, before every node that reads labels, or ids that torch does not allow to be negative.

    Returns:
        The checks by the name of the node that they precede.
    """
    embeddings = _embeddings(module)
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    inputs = {value.name for value in graph.input if value.name.partition(".")[2] not in own}
    producers = {output: node for node in graph.node for output in node.output}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
    checks: dict[str, IndexCheck] = {}
    for position, node in _backwards(graph):
        indices = node.input[0 if node.op_type == "OneHot" else 1] if len(node.input) > 1 else ""
        source = _source(indices, producers, inputs)
        axis: int | None = None
        if node.op_type in LOSSES:
            axis = 1
        elif node.op_type == "Gather" and embedding_of(node.name, embeddings) is not None:
            axis = 0
        elif node.op_type == "GatherElements" and source:
            axis = _attribute(node, "axis", 0)
        elif node.op_type != "OneHot" or not source:
            continue
        dimensions = shapes.get(node.input[0], ()) if axis is not None else ()
        size = dimensions[axis].dim_value if axis is not None and len(dimensions) > axis else 0
        what = source or ("the target of the loss" if node.op_type in LOSSES else module_scope(node.name))
        checks[node.name] = IndexCheck(what, size or None, _ignored_value(graph, node))
        _insert(graph, position, axis)
    return checks


def as_index_error(error: BaseException, checks: Mapping[str, IndexCheck]) -> IndexError | None:
    """Returns an IndexError for an ONNX Runtime error about an index out of range; None for other errors."""
    text = str(error)
    if failed := _FAILED_CHECK.search(text):
        return checks[failed["node"]].error(int(failed["coded"]) - 1 - _OFFSET)
    if failed := _FAILED_GATHER.search(text):
        inserted = checks.get(failed["node"].partition("_Grad/")[0])
        check = inserted or IndexCheck(module_scope(failed["node"]) or failed["node"], int(failed["size"]))
        return check.error(int(failed["value"]))
    if failed := _FAILED_EXPORT.search(text):
        return IndexError(failed["reason"])
    return None


def _ignored_name(graph: Any, node: Any, new: NewNodes) -> str:
    """Returns the name of the value that holds this loss's ignore index; empty if it has none."""
    if node.op_type in LOSSES and len(node.input) > 3 and node.input[3]:
        return node.input[3]
    value = _ignored_value(graph, node)
    return "" if value is None else new.constant("ignored", value)


def _ignored_value(graph: Any, node: Any) -> int | None:
    if node.op_type not in LOSSES:
        return None
    if len(node.input) > 3 and node.input[3]:
        constants = (tensor for tensor in graph.initializer if tensor.name == node.input[3])
        return next((int(onnx.numpy_helper.to_array(tensor)) for tensor in constants), None)
    return _attribute(node, "ignore_index")


def _source(name: str, producers: Mapping[str, Any], inputs: Collection[str]) -> str:
    """Returns the model input that provides the values of `name`; empty if they are computed."""
    while name in producers and producers[name].op_type in _SAME_VALUES:
        name = producers[name].input[0]
    return name if name in inputs else ""


def _attribute(node: Any, name: str, default: int | None = None) -> int | None:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def _insert(graph: Any, position: int, axis: int | None) -> None:
    """Insert a check before the node at `position`, which then reads the checked indices.

    Args:
        axis: axis of the node's first input whose size is the limit; None for a OneHot, whose second input is the
            limit.
    """
    node = graph.node[position]
    slot = 0 if axis is None else 1
    new = NewNodes(graph, f"{node.name}{_MARK}")
    indices = new.add("Cast", [node.input[slot]], "indices", to=onnx.TensorProto.INT64)
    if axis is None:
        size = new.add("Cast", [node.input[1]], "size", to=onnx.TensorProto.INT64)
    else:
        shape = new.add("Shape", [node.input[0]], "shape")
        size = new.add("Gather", [shape, new.constant("axis", axis)], "size", axis=0)
    zero = new.constant("zero", 0)
    below = new.add("Less", [indices, zero], "below")
    above = new.add("GreaterOrEqual", [indices, size], "above")
    wrong = new.add("Or", [below, above], "wrong")
    if ignored := _ignored_name(graph, node, new):
        counts = new.add("Not", [new.add("Equal", [indices, ignored], "is_ignored")], "counts")
        wrong = new.add("And", [wrong, counts], "wrong_and_counts")
    least, most = new.constant("least", -_OFFSET // 2), new.constant("most", _OFFSET // 2)
    clipped = new.add("Clip", [indices, least, most], "clipped")
    coded = new.add("Add", [clipped, new.constant("offset", _OFFSET)], "coded")
    coded = new.add("Where", [wrong, coded, zero], "coded_wrong")
    coded = new.add("Reshape", [coded, new.constant("flat", [-1])], "coded_list")
    # Append a zero, since the maximum of an empty batch is an error.
    length_zero = new.constant("length_zero", [0])
    largest = new.add("ReduceMax", [new.add("Concat", [coded, length_zero], "all", axis=0)], "largest", keepdims=1)
    length = new.add("Add", [largest, new.constant("one", [1])], "length")
    # Fails for every length except 1, on every provider; the message contains the length.
    passed = new.add("Reshape", [length_zero, length], "passed", label=f"{node.name}{_MARK}")
    passed = new.add("Reshape", [passed, new.constant("scalar", numpy.zeros(0))], "passed_scalar")
    dtype = element_type(graph, node.input[slot], onnx.TensorProto.INT64)
    passed = new.add("Cast", [passed], "addend", to=dtype)
    node.input[slot] = new.add("Add", [node.input[slot], passed], "checked")
    new.insert(position)


def nan_mean_without_labels(graph: Any) -> None:
    """Make the mean loss of a batch without labels NaN, as in PyTorch; ONNX Runtime's cross entropies return 0. The
    gradients are zero in both."""
    for position, node in _backwards(graph):
        reduction = next((attribute.s for attribute in node.attribute if attribute.name == "reduction"), b"mean")
        if node.op_type not in LOSSES or reduction != b"mean":
            continue
        new = NewNodes(graph, f"{node.name}/no_labels")
        labels = new.add("Cast", [node.input[1]], "labels", to=onnx.TensorProto.INT64)
        if not (ignored := _ignored_name(graph, node, new)):
            continue
        counts = new.add("Not", [new.add("Equal", [labels, ignored], "is_ignored")], "counts")
        counts = new.add("Cast", [counts], "counts_number", to=onnx.TensorProto.INT64)
        counts = new.add("Reshape", [counts, new.constant("flat", [-1])], "counts_list")
        counts = new.add("Concat", [counts, new.constant("none", [0])], "all_counts", axis=0)
        any_label = new.add("ReduceMax", [counts], "any_number", keepdims=0)
        any_label = new.add("Cast", [any_label], "any", to=onnx.TensorProto.BOOL)
        loss, node.output[0] = node.output[0], f"{node.name}/no_labels/zero_mean"
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element_type(graph, loss, onnx.TensorProto.FLOAT))
        new.add("Where", [any_label, node.output[0], new.constant("nan", numpy.nan, dtype)], "mean")
        new.rename_last_output(loss)
        new.insert(position + 1)


def mask_padding_gradients(graph: Any, module: torch.nn.Module) -> None:
    """Keep the gradient of an embedding's padding row at zero, as torch does.

    Without the torch extensions, embeddings are exported as Gather, which has no `padding_idx`: the row would get a
    gradient from every padded position that the loss reads, and would be trained.
    """
    embeddings = _embeddings(module)
    for position, node in _backwards(graph):
        embedding = embedding_of(node.name, embeddings) if node.op_type == "GatherGrad" else None
        if embedding is None or embedding.padding_idx is None:
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

    The expanded index of `x.gather(-1, index.expand(…))` is a view in torch and takes no memory. ONNX Runtime
    materializes it, and the gather's gradient reads it, so it is stashed as int64 at full size: in DeBERTa-v2, two
    tensors of shape (batch * heads, length, length) per layer, a quarter of all memory that a step holds
    (docs/ort_claims.md). The memory optimizer has no row for them: it traces the Expand back to a Clip, which it
    cannot recompute (orttraining/core/optimizer/memory_optimizer/recompute_analysis.cc).

    The incoming gradient has the shape of the indices (ONNX, GatherElements), so the new Expand reads its shape. The
    result is bitwise the same.
    """
    expanded = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Expand"}
    for position, node in _backwards(graph):
        if node.op_type == "GatherElementsGrad" and node.input[2] in expanded:
            gradient, _, indices = node.input
            new = NewNodes(graph, node.name)
            shape = new.add("Shape", [gradient], "indices_shape")
            node.input[2] = new.add("Expand", [expanded[indices], shape], "indices")
            new.insert(position)


def unsqueeze_grouped_conv1d_gradients(graph: Any) -> None:
    """Compute the gradient of a grouped 1D convolution as that of a 2D convolution of height 1.

    ONNX Runtime's CPU kernel of ConvGrad writes past its buffer when it computes the input gradient of a grouped
    convolution that is not 2D; the process aborts with glibc's "free(): corrupted unsorted chunks" (ConvBERT's
    separable convolutions).

    Raises:
        UnsupportedByOrt: a grouped ConvGrad with three dimensions or more.
    """
    for position, node in _backwards(graph):
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
