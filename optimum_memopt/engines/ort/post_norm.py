"""Finds the normalizations of a training graph whose recompute raises the peak instead of lowering it."""

from collections import defaultdict
from typing import Any

NORMALIZATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

POST_NORM_REASON = (
    "left out: this normalization produces the residual stream; recomputing it keeps all layers alive (higher peak)"
)


def residual_normalizations(graph: Any) -> frozenset[str]:
    """The normalization operators whose output is itself a residual operand (post-LN: BERT, RoBERTa, DeBERTa).

    In post-LN models the input of each normalization depends on the output of the previous one, so recomputing one
    needs all of them and the chain stays alive through the backward pass. In pre-LN models (GPT-2, Llama, ViT) the
    residual stream bypasses the normalization, and recomputing it saves memory.

    Args:
        graph: an `onnx.GraphProto` of the training graph, forward nodes before the `YieldOp` that ends the forward.
    """
    consumers: dict[str, list[str]] = defaultdict(list)
    produced: list[tuple[str, str]] = []
    for node in graph.node:
        if node.op_type == "YieldOp":
            break
        for name in node.input:
            consumers[name].append(node.op_type)
        if node.op_type in NORMALIZATIONS:
            produced.append((node.op_type, node.output[0]))
    return frozenset(operator for operator, output in produced if "Add" in consumers[output])
