"""Makes recipes portable: the same activation has another cluster id where ONNX Runtime fuses other operators.

The CUDA provider fuses bias and dropout operators that the CPU provider leaves apart (onnxruntime 1.19.2,
core/optimizer/{bias_gelu_fusion,bias_softmax_fusion,bias_dropout_fusion,bitmask_dropout_replacement}.cc).
"""

import itertools
from collections.abc import Collection

# Fused operator to what computes the same activation elsewhere, nearest first; the last of each makes the activation.
UNFUSED = {
    "BiasGelu": (("Gelu",), ("Add", "Gelu")),
    "BiasSoftmax": (("Softmax",), ("Add", "Softmax")),
    "BiasSoftmaxDropout": (("Softmax", "Dropout"), ("Add", "Softmax", "Dropout"), ("Dropout",)),
    "BitmaskDropout": (("Dropout",),),
    "BiasDropout": (("Add", "Dropout"), ("Dropout",), ("Add", "Dropout", "Add")),
    "BitmaskBiasDropout": (("Add", "Dropout"), ("Dropout",), ("Add", "Dropout", "Add")),
}


def operators(cluster_id: str) -> tuple[str, ...]:
    """`FusedMatMul+Add+` to its operator names."""
    return tuple(cluster_id.split("+")[:-1])


def is_fused(cluster_id: str) -> bool:
    """Whether the id holds an operator that only some providers make."""
    return any(operator in UNFUSED for operator in operators(cluster_id))


def unfused(cluster_id: str) -> tuple[str, ...]:
    """The ids that the same activation may have without provider-only fusions, nearest first."""
    choices = [UNFUSED.get(operator, ((operator,),)) for operator in operators(cluster_id)]
    spelled = (itertools.chain.from_iterable(parts) for parts in itertools.product(*choices))
    return tuple("".join(f"{operator}+" for operator in parts) for parts in spelled)


def translate(cluster_id: str, existing: Collection[str]) -> str | None:
    """The existing id that names the same activation: itself, its unfused or its fused spelling; None without one."""
    if cluster_id in existing:
        return cluster_id
    fused = [other for other in existing if is_fused(other) and cluster_id in unfused(other)]
    nearest = min(fused, key=lambda other: (unfused(other).index(cluster_id), other), default=None)
    return next((other for other in unfused(cluster_id) if other in existing), nearest)
