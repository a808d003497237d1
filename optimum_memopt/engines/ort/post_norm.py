"""Rules about which rows of a level raise the peak instead of lowering it, read off the training graph."""

from collections import defaultdict
from typing import Any

NORMALIZATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})

POST_NORM_REASON = (
    "left out: this normalization makes the residual stream; recomputing it keeps all layers alive (peak goes up)"
)


def residual_normalizations(graph: Any) -> frozenset[str]:
    """The normalization operators whose output is itself a residual operand (post-LN: BERT, RoBERTa, DeBERTa).

    There the input of each normalization is made from the output of the one before, so that recomputing one asks for
    all of them and the chain stays alive through the backward pass. In pre-LN models (GPT-2, Llama, ViT) the residual
    stream passes beside the normalization, and recomputing it does save.

    Args:
        graph: an `onnx.GraphProto` of the training graph, forward nodes ahead of the `YieldOp` that ends the forward.
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
