"""Cluster ids: the operators that make a stash again, named as ONNX Runtime names the same subgraph. Pure."""

from collections.abc import Sequence

from torch import fx

from .joint import is_tensor, is_view, root, value
from .stashes import Subgraph, is_output, layer_of, operator_name

# aten operator to what stands in its place in the graph that ONNX Runtime 1.19 exports and optimizes. Others are
# called as in aten: `tanh` is Tanh.
OPERATORS = {
    "_fused_rms_norm": ("SimplifiedLayerNormalization",),
    "_log_softmax": ("LogSoftmax",),
    "_scaled_dot_product_cudnn_attention": ("Attention",),
    "_scaled_dot_product_efficient_attention": ("Attention",),
    "_scaled_dot_product_flash_attention": ("Attention",),
    "_scaled_dot_product_flash_attention_for_cpu": ("Attention",),
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
    "full": ("ConstantOfShape",),
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
    "ne": ("Not", "Equal"),
    "nll_loss_forward": ("NegativeLogLikelihoodLoss",),
    "randint": (),
    "repeat": ("Tile",),
    "rsub": ("Sub",),
    "scalar_tensor": (),
    "silu": ("QuickGelu",),
    "stack": ("ConcatTraining",),
    "sum": ("ReduceSum",),
    "true_divide": ("Div",),
}
# What moves or picks elements; the operators that ONNX Runtime keeps as nodes.
LAYOUTS = {
    "_unsafe_view": "Reshape",
    "expand": "Expand",
    "permute": "Transpose",
    "reshape": "Reshape",
    "select": "Gather",
    "slice": "Slice",
    "split": "Split",
    "split_with_sizes": "Split",
    "squeeze": "Squeeze",
    "t": "Transpose",
    "transpose": "Transpose",
    "unbind": "Split",
    "unsqueeze": "Unsqueeze",
    "view": "Reshape",
}
# Copies that carry a view out, and what changes nothing.
_SILENT = frozenset({"alias", "clone", "detach", "lift_fresh", "lift_fresh_copy"})


def cluster_id(made: Subgraph) -> str:
    """`FusedMatMul+Add+Reshape+Transpose+` of a query projection.

    Left out are: the flattening around matrix products (the last dimension stays as it is), views of what is there
    anyway, copies that carry a view out, and, for a stash in a layer, what lies outside of all layers (the building
    of masks). Operators that are parts of one call (a decomposed normalization) count as one, and runs are folded.
    """
    reached = {*made.reads}
    inside = bool(made.stash.layer)
    names: list[str] = []
    call: object = None
    for node in (*made.nodes, *_way_to(made.stash.reads[0])):
        if node.op != "call_function" or (inside and not layer_of(node)) or _is_view_of(node, reached):
            continue
        part_of, call = call, (node.meta.get("seq_nr"), _called(node))
        if call == part_of and _called(node) != operator_name(node):
            continue
        for name in _names(node):
            if not names or names[-1] != name:
                names.append(name)
    return "".join(f"{name}+" for name in names) or "Identity+"


def _way_to(read: fx.Node) -> Sequence[fx.Node]:
    """The views from a root to what the backward reads, which ONNX Runtime stashes as tensors of their own."""
    way = []
    while is_view(read):
        way.append(read)
        read = read.args[0]
    return way[::-1]


def _is_view_of(node: fx.Node, roots: set[fx.Node]) -> bool:
    return is_view(node) and root(node) in roots


def _called(node: fx.Node) -> str:
    """The operator that was called, where the node is a part of its decomposition."""
    return getattr(node.meta.get("original_aten"), "_opname", None) or operator_name(node)


def _names(node: fx.Node) -> tuple[str, ...]:
    name = operator_name(node)
    if is_output(node):
        return (LAYOUTS[name],) if is_view(node) else ()
    if name in _SILENT or not (is_tensor(node) or isinstance(value(node), tuple | list)):
        return ()
    if name in LAYOUTS:
        return () if isinstance(value(node), tuple | list) or _keeps_rows(node) else (LAYOUTS[name],)
    called = _called(node)
    known = OPERATORS.get(called, OPERATORS.get(name))
    return ("".join(part.capitalize() for part in called.strip("_").split("_")),) if known is None else known


def _keeps_rows(node: fx.Node) -> bool:
    """A reshape or expand that leaves the last dimension alone, or every one."""
    before, after = (tuple(map(str, value(one).shape)) for one in (node.args[0], node))
    if LAYOUTS[operator_name(node)] == "Expand":
        return before == after
    return LAYOUTS[operator_name(node)] == "Reshape" and before[-1:] == after[-1:]
