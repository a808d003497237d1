"""Puts new nodes into an ONNX training graph."""

from collections.abc import Sequence
from typing import Any

import numpy
import onnx
import torch

# The export names nodes after the submodules that they come from, under this.
ROOT = "/_original_module/"


class NewNodes:
    """Nodes and constants under a common prefix, collected in topological order and inserted at once.

    Args:
        graph: an `onnx.GraphProto`.
        prefix: of the names of everything new.
    """

    def __init__(self, graph: Any, prefix: str) -> None:
        self._graph = graph
        self._prefix = prefix
        self._nodes: list[Any] = []

    def constant(self, name: str, value: Any, dtype: Any = numpy.int64) -> str:
        """A new initializer's full name."""
        full = f"{self._prefix}/{name}"
        self._graph.initializer.append(onnx.numpy_helper.from_array(numpy.asarray(value, dtype), full))
        return full

    def add(self, operator: str, inputs: Sequence[str], output: str, label: str = "", **attributes: Any) -> str:
        """A new node's output, by its full name.

        Args:
            inputs: full names.
            output: its name under the prefix.
            label: the node's name, by default that of its output and operator.
        """
        full = f"{self._prefix}/{output}"
        self._nodes.append(
            onnx.helper.make_node(operator, inputs, [full], label or f"{full}/{operator}", **attributes)
        )
        return full

    def rename_last_output(self, name: str) -> None:
        """Let the last node produce what others read under `name`."""
        self._nodes[-1].output[0] = name

    def insert(self, position: int) -> None:
        """Put them into the graph, the first at `position`."""
        for offset, node in enumerate(self._nodes):
            self._graph.node.insert(position + offset, node)


def embedding_of(node_name: str, embeddings: dict[str, torch.nn.Embedding]) -> torch.nn.Embedding | None:
    """The embedding among `embeddings` (by module name) that a node came from.

    A submodule that a forward calls several times has a number at the end of its scope from the second call on.
    """
    scope = module_scope(node_name)
    if scope in embeddings:
        return embeddings[scope]
    called, _, count = scope.rpartition("_")
    return embeddings.get(called) if count.isdigit() else None


def module_scope(node_name: str) -> str:
    """The name of the module whose forward made this node or, for one of the backward, the node that it belongs to."""
    return node_name.partition("_Grad/")[0].rpartition("/")[0].removeprefix(ROOT).replace("/", ".")


def element_type(graph: Any, name: str, default: int) -> int:
    """The `onnx.TensorProto` type of a value, as far as the graph says it."""
    values = (*graph.value_info, *graph.input, *graph.output)
    return next((value.type.tensor_type.elem_type for value in values if value.name == name), 0) or default
