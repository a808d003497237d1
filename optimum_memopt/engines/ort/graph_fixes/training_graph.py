"""Inserts nodes into an ONNX training graph."""

from collections.abc import Sequence
from typing import Any

import numpy
import onnx
import torch

# The export names nodes after their submodules, under this prefix.
ROOT = "/_original_module/"


class NewNodes:
    """Nodes and constants under a common prefix, collected in topological order and inserted at once.

    Args:
        graph: an `onnx.GraphProto`.
        prefix: of the names of all new nodes and constants.
    """

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
        """Add a node; returns the full name of its output.

        Args:
            operator: its ONNX type.
            inputs: full names.
            output: its name without the prefix.
            label: the node's name; by default made of output and operator.
            **attributes: of the node.
        """
        full = f"{self._prefix}/{output}"
        self._nodes.append(
            onnx.helper.make_node(operator, inputs, [full], label or f"{full}/{operator}", **attributes)
        )
        return full

    def rename_last_output(self, name: str) -> None:
        """Rename the output of the last node."""
        self._nodes[-1].output[0] = name

    def insert(self, position: int) -> None:
        """Insert the nodes into the graph, the first at `position`."""
        for offset, node in enumerate(self._nodes):
            self._graph.node.insert(position + offset, node)


def embedding_of(node_name: str, embeddings: dict[str, torch.nn.Embedding]) -> torch.nn.Embedding | None:
    """The embedding that a node was exported from; `embeddings` are keyed by module name.

    From the second call of a submodule in one forward on, its scope ends with a number.
    """
    scope = module_scope(node_name)
    if scope in embeddings:
        return embeddings[scope]
    called, _, count = scope.rpartition("_")
    return embeddings.get(called) if count.isdigit() else None


def module_scope(node_name: str) -> str:
    """Name of the module that a node was exported from; a gradient node has the module of its forward node."""
    return node_name.partition("_Grad/")[0].rpartition("/")[0].removeprefix(ROOT).replace("/", ".")


def element_type(graph: Any, name: str, default: int) -> int:
    """The `onnx.TensorProto` type of a value, `default` if the graph does not have it."""
    values = (*graph.value_info, *graph.input, *graph.output)
    return next((value.type.tensor_type.elem_type for value in values if value.name == name), 0) or default
