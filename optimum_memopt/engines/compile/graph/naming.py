"""Cluster ids: the operators that recompute an activation, named as ONNX Runtime names the same subgraph. Pure."""

import itertools
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.candidates import RecomputeChain
from optimum_memopt.engines.compile.graph.joint import (
    first_input,
    is_output,
    is_tensor,
    is_view,
    root,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.graph.saved_activations import (
    ATTENTION_KERNELS,
    layer_of,
    module_stack,
    operator_name,
)
from optimum_memopt.engines.simulator.work import MATRIX_PRODUCTS
from optimum_memopt.plans import matching

# ONNX operators that replace an aten operator in the graph that ONNX Runtime 1.19 exports and optimizes. Others keep
# their aten names, capitalized: `tanh` is Tanh.
OPERATORS = {
    "_fused_rms_norm": ("SimplifiedLayerNormalization",),
    "_log_softmax": ("LogSoftmax",),
    "_softmax": ("Softmax",),
    "_to_copy": ("Cast",),
    "addmm": ("FusedMatMul", "Add"),
    "arange": ("Range",),
    "baddbmm": ("MatMul", "Add"),
    "bitwise_and": ("And",),
    "bitwise_not": ("Not",),
    "bmm": ("MatMul",),
    "cat": ("ConcatTraining",),
    "constant_pad_nd": ("Pad",),
    "convert_element_type": ("Cast",),
    "convolution": ("Conv",),
    "cumsum": ("CumSum",),
    "embedding": ("Gather",),
    "eq": ("Equal",),
    "gather": ("GatherElements",),
    "ge": ("GreaterOrEqual",),
    "gt": ("Greater",),
    "index": ("GatherND",),
    "index_select": ("Gather",),
    "keep_mask": ("Dropout",),
    "le": ("LessOrEqual",),
    "logical_and": ("And",),
    "logical_not": ("Not",),
    "lt": ("Less",),
    "masked_fill": ("Where",),
    "maximum": ("Max",),
    "mean": ("ReduceMean",),
    "mm": ("FusedMatMul",),
    "native_dropout": ("Dropout",),
    "native_layer_norm": ("LayerNormalization",),
    "label_log_probs": ("FusedMatMul", "LogSoftmax", "GatherElements"),
    "ne": ("Not", "Equal"),
    "nll_loss_forward": ("NegativeLogLikelihoodLoss",),
    "repeat": ("Tile",),
    "rsub": ("Sub",),
    "silu": ("QuickGelu",),
    "stack": ("ConcatTraining",),
    "sum": ("ReduceSum",),
    "true_divide": ("Div",),
    **dict.fromkeys((*ATTENTION_KERNELS, "packed_attention"), ("Attention",)),
    **dict.fromkeys(("fill", "full", "full_like", "new_zeros", "zeros", "zeros_like"), ("ConstantOfShape",)),
    **dict.fromkeys(("randint", "scalar_tensor"), ()),
}
# Name suffixes of module classes whose operators ONNX Runtime fuses into one.
MODULES = {
    "FastGELUActivation": "FastGelu",
    "GELUTanh": "FastGelu",
    "NewGELUActivation": "FastGelu",
    "RMSNorm": "SimplifiedLayerNormalization",
    "T5LayerNorm": "SimplifiedLayerNormalization",
}
# Operators that move or pick elements and are nodes in ONNX Runtime's graph too.
LAYOUTS = {
    **dict.fromkeys(("_unsafe_view", "reshape", "view"), "Reshape"),
    **dict.fromkeys(("permute", "t", "transpose"), "Transpose"),
    **dict.fromkeys(("split", "split_with_sizes", "unbind"), "Split"),
    "expand": "Expand",
    "select": "Gather",
    "slice": "Slice",
    "squeeze": "Squeeze",
    "unsqueeze": "Unsqueeze",
}
# Copies that materialize a view, and operators without effect.
_SILENT = frozenset({"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"})
# Calls that reshape and expand their operands; ONNX Runtime's products take any number of dimensions.
_PRODUCTS = frozenset({"Linear", "linear", "matmul"})
# Ids with more operators are too error-prone to type; they keep only the operators nearest to the activation.
_LONGEST = 10
_NEAREST = 6

# ONNX Runtime's id of an activation to the ids of the same activation here, for subgraphs that it cuts elsewhere. In
# ONNX Runtime one node computes a dropout and its mask, so that a saved mask ends the subgraph of the residual stream
# after it, as do the saved statistics of a normalization. Here the mask follows from a generator's state, and
# statistics end no chain.
CUT_ELSEWHERE = {
    "Add+": ("FusedMatMul+Add+Dropout+Add+", "FusedMatMul+Add+Add+", "FusedMatMul+Dropout+Add+"),
    "FusedMatMul+": ("FusedMatMul+Relu+",),
    "FusedMatMul+Softmax+": ("MatMul+Mul+Softmax+",),
    "Reshape+": ("Dropout+Reshape+",),
    "Softmax+": ("MatMul+Mul+Add+Softmax+", "MatMul+Add+Softmax+", "MatMul+Mul+Softmax+", "MatMul+Softmax+"),
    "Transpose+Mul+Mul+Add+": ("SimplifiedLayerNormalization+Transpose+Mul+Add+",),
    "Transpose+Mul+Mul+Add+Unsqueeze+Expand+Reshape+": (
        "SimplifiedLayerNormalization+Transpose+Mul+Add+Unsqueeze+Expand+Reshape+",
    ),
    "Tile+": ("FusedMatMul+Add+Reshape+Transpose+Reshape+Tile+",),
    **{
        end: (f"LayerNormalization+{end}",)
        for end in ("Dropout+", "Gather+", "Gather+Dropout+", "Mul+", "Mul+Dropout+")
    },
}
# ONNX Runtime's merged operators, and the operators that they consist of.
_MERGED = {"FusedMatMul": ("MatMul",), "Gemm": ("MatMul", "Add")}
_RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze"})
# Swapping the last dimension's halves and negating one, as a rotary embedding does between its products. ONNX Runtime
# saves the result separately.
_ROTATION = ["Mul", "Slice", "Neg", "ConcatTraining", "Mul"]


def translate(cluster_id: str, existing: Collection[str]) -> str | None:
    """Returns the existing id of the activation that ONNX Runtime calls `cluster_id`, or None.

    It is the id itself, an id with another provider's fusions, one that differs only in reshapes, or one whose
    subgraph ONNX Runtime cuts elsewhere.
    """
    if exact := matching.translate(cluster_id, existing):
        return exact
    for spelled in matching.unfused(cluster_id):
        for same in (spelled, *CUT_ELSEWHERE.get(spelled, ())):
            if same in existing:
                return same
            matches = [other for other in existing if _computing(other) == _computing(same)]
            if len(matches) == 1 and _computing(spelled):
                return matches[0]
    return None


def _computing(cluster_id: str) -> tuple[str, ...]:
    """Returns the operators of an id without reshapes, merged operators split and repetitions folded."""
    merged = (_MERGED.get(operator, (operator,)) for operator in matching.operators(cluster_id))
    names = (operator for parts in merged for operator in parts if operator not in _RESHAPES)
    return tuple(name for name, _ in itertools.groupby(names))


def dropout_of(mask: fx.Node) -> fx.Node | None:
    """Returns the output of a mask's dropout; None if the node is no mask, or if nothing reads the output."""
    if _called(mask) != "native_dropout":
        return None
    last = mask
    while behind := [user for user in last.users if _call(user) == _call(mask)]:
        last = behind[-1]
    return last if last is not mask and tensor_value(mask).dtype == torch.bool else None


def cluster_id(chain: RecomputeChain) -> str:
    """Returns an activation's cluster id: `FusedMatMul+Add+Reshape+Transpose+` for a query projection.

    Left out are the reshapes within a matrix product, views of storages that are held anyway, copies that materialize
    a view, and, for an activation in a layer, operators outside of all layers (the computation of masks). Operators of
    one call (a decomposed normalization) or of one of `MODULES` count as one, and repetitions of one operator are
    folded.
    """
    activation, reached = chain.activation, {*chain.reads}
    names: list[str] = []
    call: object = None
    last: tuple[str, ...] = ()
    inner = [node for node in chain.nodes if not (activation.layer and not layer_of(node))]
    computing = [node for node in inner if not (is_view(node) and root(node) in reached)]
    for node in (*computing, *_views_to(activation.reads[0])):
        is_constant = OPERATORS.get(operator_name(node)) == ("ConstantOfShape",)
        if node.op != "call_function" or (is_constant and node is not activation.root):
            continue
        part_of, call = call, _call(node)
        if call == part_of and _called(node) != operator_name(node):
            continue
        parts = _names(node)
        if parts and parts != last:
            names.extend(parts)
            last = parts
    names = _without_rotations(names)
    nearest = names if len(names) <= _LONGEST else names[-_NEAREST:]
    return "".join(f"{name}+" for name in nearest) or "Identity+"


def _without_rotations(names: list[str]) -> list[str]:
    for start in reversed(range(len(names))):
        if names[start : start + len(_ROTATION)] == _ROTATION:
            names = [*names[: start + 1], *names[start + len(_ROTATION) :]]
    return names


def _views_to(read: fx.Node) -> Sequence[fx.Node]:
    """Returns the views from a root to the tensor that the backward reads; ONNX Runtime saves them as separate
    tensors."""
    views = []
    while is_view(read):
        views.append(read)
        read = first_input(read)
    return views[::-1]


def _called(node: fx.Node) -> str:
    """Returns the name of the called operator; the node may be a part of its decomposition."""
    return getattr(node.meta.get("original_aten"), "_opname", None) or operator_name(node)


def _call(node: fx.Node) -> tuple[object, str]:
    return node.meta.get("seq_nr"), _called(node)


def _names(node: fx.Node) -> tuple[str, ...]:
    name = operator_name(node)
    module = next((kind for *_, kind in reversed(module_stack(node))), "")
    for end, fused in MODULES.items():
        if module.endswith(end):
            return (fused,)
    if is_output(node):
        return (LAYOUTS[name],) if is_view(node) else ()
    if name in _SILENT or not (is_tensor(node) or isinstance(value(node), tuple | list)):
        return ()
    if name in LAYOUTS:
        return () if isinstance(value(node), tuple | list) or _is_silent(node) else (LAYOUTS[name],)
    called = _called(node)
    if name == "addmm":
        rows = cast(fx.Node, node.args[1])
        # A product with more than two dimensions reshapes its operand itself.
        if not (is_view(rows) and operator_name(rows) in LAYOUTS and _is_silent(rows)):
            return ("Gemm",)
    if name == "gelu" and node.kwargs.get("approximate") == "tanh":
        return ("FastGelu",)
    operators = OPERATORS.get(called, OPERATORS.get(name))
    return ("".join(part.capitalize() for part in called.strip("_").split("_")),) if operators is None else operators


def _is_silent(node: fx.Node) -> bool:
    """True for a layout operator that is part of a matrix product, or that changes nothing."""
    before, after = (tuple(map(str, tensor_value(n).shape)) for n in (first_input(node), node))
    layout = LAYOUTS[operator_name(node)]
    if layout in ("Expand", "Reshape") and before == after:
        return True
    if layout == "Transpose" and _swaps_last_two(node) and _is_multiplied(node):
        return True
    source = node.meta.get("source_fn_stack")
    if source:
        return getattr(source[-1][1], "__name__", source[-1][1]) in _PRODUCTS
    return layout == "Reshape" and before[-1:] == after[-1:]


def _swaps_last_two(node: fx.Node) -> bool:
    count = tensor_value(node).dim()
    if operator_name(node) == "permute":
        order = [dim % count for dim in cast(Sequence[int], node.args[1])]
        return order == [*range(count - 2), count - 1, count - 2]
    dims = cast(Sequence[int], node.args[1:] or (0, 1))
    return {dim % count for dim in dims} == {count - 2, count - 1}


def _is_multiplied(node: fx.Node) -> bool:
    """True if a matrix product reads it; products transpose their own operands (FusedMatMul's transA, transB)."""
    for user in node.users:
        name = operator_name(user)
        is_carried = name in _SILENT or LAYOUTS.get(name) in ("Expand", "Reshape")
        if user.op == "call_function" and (name in MATRIX_PRODUCTS or (is_carried and _is_multiplied(user))):
            return True
    return False
