"""What the backward reads of the forward, storage by storage, and what it would take to make each again. Pure."""

import re
from collections.abc import Collection
from dataclasses import dataclass

import sympy
from torch import fx

from optimum_memopt.engines.compile.analysis.joint import (
    JointGraph,
    is_number,
    is_tensor,
    is_view,
    root,
    storage_bytes,
)

# Lists of layers are called one of these in transformers and timm (`albert_layers` too); the first in a path is the
# transformer's layer.
_LAYER = re.compile(r"(?:^|\.)(?:\w+_)?(?:layers?|h|blocks?)\.\d+(?=\.|$)")
# Dynamo's mark of a module's second call and later ones, at the end of a key of `nn_module_stack`.
_CALL = re.compile(r"@\d+$")
# A constant-size stash of less than this (bytes) is not worth a row, or counting.
_CRUMB = 4096
# Outputs beside the first of these operators are statistics of a row each: tiny, and dear to make again.
_WITH_STATISTICS = frozenset({"native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm"})
_STATISTICS = frozenset({"amax", "var_mean", "logsumexp", "mean", "sum", "rsqrt"})


def is_output(node: fx.Node) -> bool:
    """Whether this picks one output of an operator that has several."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def operator_name(node: fx.Node) -> str:
    """`gelu` of `aten.gelu.default`; an output of an operator that has several has that operator's name."""
    target = node.args[0].target if is_output(node) else node.target
    return getattr(target, "_opname", None) or getattr(target, "__name__", str(target))


def module_path(node: fx.Node) -> str:
    """Where in the module tree the operator was called: `roberta.encoder.layer.0.intermediate.dense`."""
    stack = _module_stack(node)
    return stack[-1][1] if stack else ""


def module_class(node: fx.Node) -> str:
    """The name of the class of the innermost module in which the operator was called: `Linear`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    _, kind = next(reversed(stack.values()), ("", ""))
    return kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__


def layer_of(node: fx.Node) -> str:
    """The path of the transformer layer around the operator, "" outside of all.

    A layer that is called several times (ALBERT) is one at each call: the later ones end in `@1`, `@2` and so on.
    """
    stack = _module_stack(node)
    match = _LAYER.search(stack[-1][1]) if stack else None
    if match is None:
        return ""
    path = stack[-1][1][: match.end()]
    calls = (_CALL.search(key) for key, outer in stack if path.startswith(outer))
    # A group of layers and the layer in it are called equally often.
    return path + "".join(dict.fromkeys(call[0] for call in calls if call))


def _module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """Dynamo's key and the path of each module around the operator, from the outside in.

    Until torch 2.10 the paths of lists have their inner names, `L['self']._modules['layer']._modules['0']`.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = {key: re.sub(r"\._modules\['([^']*)'\]", r".\1", path) for key, (path, _) in stack.items()}
    return [(key, re.sub(r"^L\['[^']*'\]\.?", "", path)) for key, path in paths.items()]


def is_negligible(size: sympy.Expr) -> bool:
    """Whether a storage is too small to care and does not grow with the batch."""
    return not size.free_symbols and size < _CRUMB


@dataclass(frozen=True, eq=False)
class SavedActivation:
    """A storage that the forward makes and the backward reads.

    Attributes:
        root: the operator (or output of one) that allocates it.
        reads: the nodes through which the backward reads it, the root itself or views of it.
        bytes: its size in the symbols of the graph.
        is_returned: the forward returns it too, so whoever called may hold it.
        leaves_layer: the forward reads it outside of the layer that makes it (the residual stream between layers).
    """

    root: fx.Node
    reads: tuple[fx.Node, ...]
    bytes: sympy.Expr
    is_returned: bool
    leaves_layer: bool

    @property
    def layer(self) -> str:
        return layer_of(self.root)


def find_saved_activations(joint: JointGraph) -> tuple[SavedActivation, ...]:
    """All of them in graph order; parameters and other inputs are not among them."""
    reads: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.backward_reads():
        made = root(node)
        if made.op == "call_function":
            reads.setdefault(made, []).append(node)
    returned = {root(node) for node in joint.forward_outputs}
    readers: dict[fx.Node, set[str]] = {}
    for node in joint.forward:
        if not is_view(node):
            for read in node.all_input_nodes:
                readers.setdefault(root(read), set()).add(layer_of(node))
    return tuple(
        SavedActivation(
            made,
            tuple(nodes),
            storage_bytes(made),
            made in returned,
            bool(readers.get(made, set()) - {layer_of(made)}),
        )
        for made, nodes in sorted(reads.items(), key=lambda item: joint.order[item[0]])
    )


def is_statistic(node: fx.Node) -> bool:
    """One number for each row that an operator has reduced: kept whatever the plan says, where the backward reads it.

    Where it does not (the sums of a softmax that a compiler has taken apart), it is made again with its operator.
    """
    if is_output(node) and operator_name(node) in _WITH_STATISTICS:
        return node.args[1] > 0
    return is_tensor(node) and operator_name(node) in _STATISTICS


@dataclass(frozen=True, eq=False)
class RecomputeChain:
    """What makes a stash again.

    Attributes:
        stash: the one to make again.
        nodes: the operators to run again, in graph order; the last makes it.
        reads: storages that are there anyway: inputs and other stashes.
        extra_saved: nodes that are no stash and must be kept in exchange, since they must not run again.
    """

    stash: SavedActivation
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    extra_saved: tuple[fx.Node, ...]

    @property
    def saving(self) -> sympy.Expr:
        """Bytes of the stash less those kept in exchange, but for crumbs such as a seed."""
        return sympy.expand(self.stash.bytes - sum(self._exchanged))

    @property
    def is_compromise(self) -> bool:
        """Whether more than crumbs is kept in exchange."""
        return bool(self._exchanged)

    @property
    def _exchanged(self) -> list[sympy.Expr]:
        sizes = (storage_bytes(root(node)) for node in self.extra_saved)
        return [size for size in sizes if not is_negligible(size)]


def producing_operator(stash: SavedActivation) -> RecomputeChain:
    """The operator alone that makes a stash, for one that is kept elsewhere and not made again."""
    operator = [stash.root.args[0]] if is_output(stash.root) else []
    return RecomputeChain(stash, (*operator, stash.root), (), ())


def recompute_chain(
    joint: JointGraph, stash: SavedActivation, available: Collection[fx.Node]
) -> RecomputeChain | None:
    """The way back from a stash to inputs and `available` storages; None where it must not be made again.

    Args:
        available: roots of stashes that stay.
    """
    if joint.is_impure(stash.root) or is_statistic(stash.root):
        return None
    nodes, reads, extra_saved = {stash.root}, {}, {}
    todo = [stash.root]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in nodes or is_number(node):
                continue
            made = root(node) if is_tensor(node) else node
            if made is not stash.root and (made.op == "placeholder" or made in available):
                reads[made] = None
                if node is made:
                    continue
            elif joint.is_impure(node):
                extra_saved[node] = None
                continue
            nodes.add(node)
            todo.append(node)
    ordered = tuple(sorted(nodes, key=joint.order.__getitem__))
    return RecomputeChain(stash, ordered, tuple(reads), tuple(extra_saved))
