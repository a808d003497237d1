"""Finds projection to the vocabulary -> elementwise operators -> cross entropy in a graph that dynamo traced. Pure.

In dynamo's graph `linear` and `cross_entropy` are still calls of `torch.nn.functional`; in a joint graph they are a
dozen operators of forward and backward.
"""

import inspect
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from optimum_memopt.engines.compile.loss.operator import LossShape
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.engines.torch_compat.fx_graph import autocast_dtype
from optimum_memopt.engines.torch_compat.traced_sizes import elements, symbolic

_CROSS_ENTROPY = inspect.signature(functional.cross_entropy)
_FLATTENS = frozenset({"view", "reshape", "flatten"})
_CASTS = frozenset({"float", "double", "to", "type", "contiguous"})
_MULTIPLIES = frozenset({"mul", "multiply"})
_DIVIDES = frozenset({"div", "truediv", "divide"})


class _DoesNotFit(Exception):
    """Raised with the reason why a loss cannot be chunked."""


@dataclass(frozen=True, eq=False)
class Projection:
    """A call of `torch.nn.functional.linear`.

    Attributes:
        hidden: (…, width).
        weight: (vocabulary, width).
        bias: (vocabulary,), or None.
    """

    node: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @classmethod
    def of(cls, node: fx.Node) -> "Projection":
        given: dict[str, Any] = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
        return cls(node, given["input"], given["weight"], given.get("bias"))


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA's part of a projection's output.

    Attributes:
        projection: the product of hidden states after its first matrix, (…, rank), by its second, (vocabulary, rank).
        scale: factor of the projection's output.
    """

    projection: Projection
    scale: float


@dataclass(frozen=True, eq=False)
class LossChain:
    """A cross entropy that is the only reader of a projection's output.

    Attributes:
        projection: the projection of the hidden states, (…, hidden size), to the vocabulary.
        slices: the slices of the projection's rows, in order: a causal model predicts nothing at its last token.
        offset: (1, …, vocabulary), added to the projection's output (BART's `final_logits_bias`), or None.
        adapter: a LoRA on the projection, or None.
        scale: factor of the projection's output.
        softcap: not 0: the scaled logits become `softcap * tanh` of them.
        ignore_index: the label of rows that do not count; a node if dynamo made it an input of the graph.
        is_returned: the forward returns the logits, so its caller may read them.
    """

    cross_entropy: fx.Node
    projection: Projection
    slices: tuple[fx.Node, ...]
    offset: fx.Node | None
    adapter: Adapter | None
    scale: float
    softcap: float
    labels: fx.Node
    ignore_index: int | fx.Node
    mean: bool
    label_smoothing: float
    is_returned: bool

    @cached_property
    def shape(self) -> LossShape:
        """Returns sizes and dtypes, with the rows in the symbols of the graph."""
        hidden, weight = traced_tensor(self.projection.hidden), traced_tensor(self.projection.weight)
        vocabulary, hidden_size = map(int, weight.shape)
        compute = autocast_dtype(self.projection.node, hidden.device.type) or hidden.dtype
        rank = int(traced_tensor(self.adapter.projection.weight).shape[1]) if self.adapter else 0
        sizes, dtypes = (elements(traced_tensor(self.labels)), hidden_size, vocabulary), (hidden.dtype, weight.dtype)
        needs = hidden.requires_grad, weight.requires_grad
        return LossShape(*sizes, *dtypes, compute, bool(self.softcap), *needs, rank)

    @property
    def first_rows(self) -> int:
        """Returns the number of rows in the batch that the graph was traced with."""
        sizes = traced_tensor(self.labels).shape
        return math.prod(int(size.node.hint) if isinstance(size, torch.SymInt) else size for size in sizes)


def find_losses(graph: fx.Graph) -> Iterator[LossChain | str]:
    """Yields for each cross entropy of a graph that dynamo traced its chain, or why it cannot be chunked."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is functional.cross_entropy:
            try:
                yield _chain(node)
            except _DoesNotFit as reason:
                yield str(reason)


def traced_tensor(node: fx.Node) -> torch.Tensor:
    """Returns the fake tensor that dynamo traced for a node."""
    return node.meta["example_value"]


def _chain(loss: fx.Node) -> LossChain:
    bound = _CROSS_ENTROPY.bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    call = bound.arguments
    if call["weight"] is not None or call["size_average"] is not None or call["reduce"] is not None:
        raise _DoesNotFit("its classes have weights")
    if call["reduction"] not in ("mean", "sum"):
        raise _DoesNotFit("it is not reduced to one number")
    if isinstance(call["label_smoothing"], fx.Node):
        raise _DoesNotFit("its label_smoothing is not a constant")
    if traced_tensor(call["target"]).is_floating_point():
        raise _DoesNotFit("its labels are probabilities")
    projection, *steps = path = _path(call["input"], loss)
    users = (user for node in path for user in node.users)
    chain = LossChain(
        loss,
        Projection.of(projection),
        **vars(_read_steps(projection, steps)),
        labels=call["target"],
        ignore_index=call["ignore_index"],
        mean=call["reduction"] == "mean",
        label_smoothing=float(call["label_smoothing"]),
        is_returned=any(user.op == "output" or (_is_output(user) and user.users) for user in users),
    )
    _check_unwritten(chain)
    return chain


def _check_unwritten(chain: LossChain) -> None:
    """Raises _DoesNotFit if a tensor that the projection reads is changed before the loss, where a chunked loss would
    read it."""
    projections = [chain.projection, *([chain.adapter.projection] if chain.adapter else [])]
    read = {node for each in projections for node in (each.hidden, each.weight, each.bias)} | {chain.offset}
    first = next(node for node in chain.projection.node.graph.nodes if node in {each.node for each in projections})
    for writer in writers(chain.projection.node.graph, {node for node in read if node is not None}):
        if first < writer < chain.cross_entropy:
            raise _DoesNotFit(f"{node_name(writer)} changes what its projection reads")


def writers(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node]:
    """Returns the operators of a graph that write to the storage of one of these nodes."""
    held = set().union(*map(dynamo.traced_storages, nodes))
    return [node for node in graph.nodes if dynamo.writes_to_any(node, held)]


def _path(node: fx.Node, reader: fx.Node) -> list[fx.Node]:
    if readers := [user for user in node.users if user is not reader and not _is_output(user)]:
        raise _DoesNotFit(f"its logits are also read by {node_name(readers[0])}")
    if _is_projection(node):
        return [node]
    if node.op not in ("call_function", "call_method"):
        raise _DoesNotFit("a graph break separates it from the logits")
    tensors = [read for read in node.all_input_nodes if isinstance(read.meta.get("example_value"), torch.Tensor)]
    if not tensors:
        raise _DoesNotFit(f"{node_name(node)} makes its logits")
    # Biases and factors have fewer dimensions than the logits.
    logits = max(tensors, key=lambda read: traced_tensor(read).dim())
    return [*_path(logits, node), node]


def _is_projection(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is functional.linear


def _is_output(node: fx.Node) -> bool:
    """True for the graph's output, and for a detached tensor that nothing else reads."""
    return node.op == "output" or (node_name(node) == "detach" and all(user.op == "output" for user in node.users))


@dataclass(frozen=True)
class _Steps:
    """The operators between a projection and its loss; attributes as of `LossChain`."""

    slices: tuple[fx.Node, ...]
    offset: fx.Node | None
    adapter: Adapter | None
    scale: float
    softcap: float


def _read_steps(projection: fx.Node, steps: Sequence[fx.Node]) -> _Steps:
    """Returns what the operators compute. Raises _DoesNotFit if a chunked loss cannot compute it."""
    slices: list[fx.Node] = []
    offset: fx.Node | None = None
    adapter: Adapter | None = None
    scale, softcap, is_flat = 1.0, 0.0, False
    for before, node in zip((projection, *steps), steps, strict=False):
        name, result = node_name(node), traced_tensor(node)
        classes = traced_tensor(before).shape[-1]
        keeps_classes = result.dim() > 0 and _is_same(result.shape[-1], classes)
        if name in _CASTS and _is_cast(traced_tensor(before), result):
            continue
        # (rows, classes, tokens), the order that a cross entropy expects for more than two dimensions.
        is_transposed = name == "transpose" and result.dim() == 3 and _is_same(result.shape[1], classes)
        if (name in _FLATTENS and keeps_classes) or (is_transposed and node is steps[-1]):
            is_flat = True
        elif name == "getitem" and not is_flat and keeps_classes and _slices_rows(node):
            slices.append(node)
        elif name == "tanh" and not softcap:
            softcap = 1.0
        elif name in _MULTIPLIES | _DIVIDES and (factor := _factor(node, before)):
            scale, softcap = (scale, softcap * factor) if softcap else (scale * factor, softcap)
        elif name == "add" and (scale, softcap) == (1, 0) and not slices and (added := _added(node, before)):
            if (adapter if isinstance(added, Adapter) else offset) is not None:
                raise _DoesNotFit("more than one tensor is added to its logits")
            products = [before, *([added.projection.node] if isinstance(added, Adapter) else [])]
            if any(not _has_shape(product, result) for product in products):
                raise _DoesNotFit("a projection of fewer tokens is added to its logits")
            adapter, offset = (added, offset) if isinstance(added, Adapter) else (adapter, added)
        else:
            raise _DoesNotFit(f"{name} comes between the projection and it")
    return _Steps(tuple(slices), offset, adapter, scale, softcap)


def _is_same(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """True for equal constants; comparing symbols would add guards on their values."""
    return isinstance(size, int) and isinstance(other, int) and size == other


def _has_shape(node: fx.Node, result: torch.Tensor) -> bool:
    """True if a tensor has the sizes of a result, whatever their symbols stand for."""
    return list(map(symbolic, traced_tensor(node).shape)) == list(map(symbolic, result.shape))


def _is_cast(before: torch.Tensor, after: torch.Tensor) -> bool:
    """True if only the dtype changes, to one that represents all values."""
    is_wider = torch.promote_types(before.dtype, after.dtype) == after.dtype
    return is_wider and before.device == after.device and before.dim() == after.dim()


def _slices_rows(node: fx.Node) -> bool:
    index = node.args[1] if isinstance(node.args[1], tuple | list) else (node.args[1],)
    rank = traced_tensor(node).dim()
    are_ranges = all(isinstance(item, slice) or item is Ellipsis for item in index)
    reaches_classes = len(index) == rank or Ellipsis in index
    return are_ranges and (not reaches_classes or index[-1] == slice(None))


def _factor(node: fx.Node, logits: fx.Node) -> float | None:
    """Returns the number by which the logits are multiplied; None if the factor is not a number."""
    if node.kwargs or len(node.args) != 2 or not isinstance(number := _other_operand(node, logits), int | float):
        return None
    if node_name(node) in _MULTIPLIES:
        return float(number)
    return 1 / number if node.args[0] is logits and number else None


def _added(node: fx.Node, logits: fx.Node) -> Adapter | fx.Node | None:
    """Returns the operand that is added to the logits: a LoRA, or a node with one value for each class; else None."""
    added = _other_operand(node, logits)
    if not isinstance(added, fx.Node) or node.kwargs:
        return None
    tensor = traced_tensor(added)
    is_row = tensor.dim() > 0 and _is_same(tensor.shape[-1], traced_tensor(logits).shape[-1])
    return added if is_row and all(_is_same(size, 1) for size in tensor.shape[:-1]) else _adapter(added)


def _other_operand(node: fx.Node, logits: fx.Node) -> Any:
    operands = [argument for argument in node.args if argument is not logits]
    return operands[0] if len(operands) == 1 else None


def _adapter(node: fx.Node) -> Adapter | None:
    """Returns the LoRA that a node computes: a projection without bias and with one reader, possibly times a number;
    None if it is none."""
    scale = 1.0
    if node_name(node) in _MULTIPLIES and isinstance(product := node.args[0], fx.Node):
        if (factor := _factor(node, product)) is None or len(node.users) > 1:
            return None
        node, scale = product, factor
    if not _is_projection(node) or len(node.users) > 1:
        return None
    projection = Projection.of(node)
    return Adapter(projection, scale) if projection.bias is None else None


def node_name(node: fx.Node) -> str:
    """Returns the name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
