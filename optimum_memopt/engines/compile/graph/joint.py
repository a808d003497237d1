"""Analyzes the joint graph of forward and backward: each storage's allocating operator, readers and size. Pure.

A *storage* is identified by its root, the operator that allocates it; views are followed back to it by the aliasing
that their schemas declare (the storage of a FakeTensor is no help: functionalization creates new ones for views).
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import sympy
import torch
from torch import fx

from optimum_memopt.engines.torch_compat import dynamo, fx_graph
from optimum_memopt.engines.torch_compat.traced_sizes import symbolic

# Their schemas declare no alias, yet they never copy (aten/src/ATen/native/TensorShape.cpp).
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "lift_fresh"})
# Key of a node's meta: marks a host copy in a graph that runs on another device.
ON_HOST = "optimum_memopt_on_host"
# Key of a node's meta: marks a copy of an input that may change before the backward (see `state_copies`).
STATE_COPY = "optimum_memopt_state_copy"


def value(node: fx.Node) -> object:
    """Returns the traced value of a node: a FakeTensor, a symbolic number, or a tuple of them."""
    return node.meta.get("val")


def tensor_value(node: fx.Node) -> dynamo.FakeTensor:
    """Returns the fake tensor of a node for which `is_tensor` holds."""
    return cast(dynamo.FakeTensor, node.meta["val"])


def first_input(node: fx.Node) -> fx.Node:
    """Returns the first argument of an operator that takes one or more tensors."""
    return cast(fx.Node, node.args[0])


def is_on_host(node: fx.Node) -> bool:
    """True for a host copy in a graph that runs elsewhere: it takes none of the device's memory."""
    return bool(node.meta.get(ON_HOST))


def is_state_copy(node: fx.Node) -> bool:
    """True for a copy of an input that may change before the backward."""
    return bool(node.meta.get(STATE_COPY))


def is_barrier(node: fx.Node) -> bool:
    """True for an operator that makes a recompute wait, see `partition/strategies/recompute.py`."""
    return node.target is torch.ops.optimum_memopt.after.default


def is_accumulation_operator(target: object) -> bool:
    """True for the operator of `partition/accumulation.py`."""
    return str(target) == "optimum_memopt.accumulate.default"


def is_accumulation(node: fx.Node) -> bool:
    """True for an operator that accumulates a gradient in place."""
    return is_accumulation_operator(node.target)


def is_tensor(node: fx.Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def has_parts(node: fx.Node) -> bool:
    """True for an operator that returns several tensors, which `is_output` nodes pick: a tuple, or a Triton kernel's
    dict."""
    return isinstance(value(node), tuple | list | dict)


def is_number(node: fx.Node) -> bool:
    """True for a symbolic size or another symbolic number."""
    return isinstance(value(node), dynamo.SymbolicNumber)


def is_output(node: fx.Node) -> bool:
    """True for a node that picks one output of a multi-output operator."""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """True for an operator that returns a view of its first argument."""
    if node.op != "call_function":
        return False
    if is_output(node):
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if dynamo.operator_name(node.target) in _UNDECLARED_VIEWS:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def root(node: fx.Node) -> fx.Node:
    """Returns the node that allocates the storage of `node`; an output of a multi-output operator is its own root."""
    while is_view(node):
        node = first_input(node)
    return node


@dataclass(frozen=True)
class Inlined:
    """Operators whose results are never stored, since a compiler computes them within the kernels that read them.

    Attributes:
        operands: by operator name, the index in `all_input_nodes` of the operand that is held until the last reader
            instead; None: none is.
    """

    operands: dict[str, int | None] = field(default_factory=dict)

    def is_view(self, node: fx.Node) -> bool:
        return is_view(node) or (node.name in self.operands and node.op == "call_function")

    def without(self, materialized: Iterable[fx.Node]) -> "Inlined":
        names = {node.name for node in materialized}
        return Inlined({name: operand for name, operand in self.operands.items() if name not in names})

    def root(self, node: fx.Node) -> fx.Node | None:
        """Returns the node that allocates the storage that is held for `node`; None: no storage is held."""
        while (own := root(node)).name in self.operands and own.op == "call_function":
            operand = self.operands[own.name]
            if operand is None:
                return None
            node = own.all_input_nodes[operand]
        return own


def is_chunked_loss(node: fx.Node) -> bool:
    """True for the operator of `loss/operator.py`."""
    return str(node.target) == "optimum_memopt.chunked_loss.default"


def is_loss_gradient(node: fx.Node) -> bool:
    """True for an output of the chunked loss other than the first, which is the loss."""
    return is_output(node) and is_chunked_loss(first_input(node)) and cast(int, node.args[1]) > 0


def is_scaling(node: fx.Node, gradient: fx.Node) -> bool:
    """True for a product that scales a gradient of the chunked loss: as its only reader, it may work in place."""
    is_product = node.target is torch.ops.aten.mul.Tensor and node.args[0] is gradient
    return is_product and tensor_value(node).dtype == tensor_value(gradient).dtype


def storage_bytes(node: fx.Node) -> sympy.Expr:
    """Returns the bytes of a root's storage, gaps between strides included.

    For an in-place accumulation: the bytes of the gradient, which it keeps if there is no earlier one.
    """
    tensor = tensor_value(first_input(node) if is_accumulation(node) else node)
    if dynamo.operator_name(node.target) == "copy":
        # As large as the storage of the destination, of which it may be a part.
        return symbolic(tensor.untyped_storage().nbytes())
    reach = sympy.Integer(1)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (symbolic(size) - 1) * symbolic(stride)
    empty = any(size == 0 for size in tensor.shape if isinstance(size, int))
    dtype = torch.float32 if fx_graph.is_float32_statistic(node) else tensor.dtype
    return sympy.Integer(0) if empty else sympy.expand(reach * dtype.itemsize)


@dataclass(frozen=True)
class JointGraph:
    """A joint graph as AOTAutograd traced it, functional and without dead code; outputs of the forward come first."""

    module: fx.GraphModule
    num_fwd_outputs: int

    @cached_property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(self.module.graph.nodes)

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        return {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        return tuple(dynamo.tree_leaves(self.module.graph.output_node().args))

    @cached_property
    def forward_outputs(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.outputs[: self.num_fwd_outputs] if isinstance(node, fx.Node))

    @cached_property
    def backward_outputs(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.outputs[self.num_fwd_outputs :] if isinstance(node, fx.Node))

    @cached_property
    def backward(self) -> frozenset[fx.Node]:
        """Returns the nodes that depend on a gradient or were traced in the backward."""
        # The nodes traced in the forward come before those of the backward.
        forward = (index for index, node in enumerate(self.nodes) if fx_graph.is_tagged_forward(node))
        end_of_forward = max(forward, default=len(self.nodes))
        # Except views of its results that AOTAutograd returns, which come last (Longformer).
        returned = set(self.forward_outputs)
        for node in reversed(self.nodes[end_of_forward + 1 :]):
            returned.update(node.all_input_nodes if node in returned else ())
        dependent: set[fx.Node] = set()
        for index, node in enumerate(self.nodes):
            if node.op == "output":
                continue
            # Frozen weights that an autograd function dequantizes again in its backward depend on no gradient. Sizes
            # that are first read in the backward still belong to the forward, so that the backward does not read a
            # tensor for its size.
            is_later = index > end_of_forward and fx_graph.is_untagged(node) and not is_number(node)
            is_later = is_later and node not in returned
            is_tagged = fx_graph.is_tangent(node) or fx_graph.is_tagged_backward(node)
            if is_tagged or is_later or node in dependent:
                dependent.add(node)
                dependent.update(user for user in node.users if user.op != "output")
        return frozenset(dependent)

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.nodes if n.op == "placeholder" and n not in self.backward)

    @cached_property
    def gradients(self) -> dict[fx.Node, fx.Node | None]:
        """Returns each input's gradient or None; empty if the backward does not return one result for each input."""
        returned = self.outputs[self.num_fwd_outputs :]
        return dict(zip(self.inputs, returned, strict=True)) if len(returned) == len(self.inputs) else {}

    @cached_property
    def mutated_inputs(self) -> frozenset[fx.Node]:
        return fx_graph.mutated_inputs(self.module.graph)

    def is_impure(self, node: fx.Node) -> bool:
        """True if a node must not run twice: it draws random numbers, reads an input that is written to in between
        (running statistics), copies an input that may change, or is a loss that computes its own gradients, at the
        cost of three products with all classes."""
        if is_output(node):
            node = first_input(node)
        return fx_graph.is_random(node) or is_chunked_loss(node) or self.reads_former_state(node)

    def reads_former_state(self, node: fx.Node) -> bool:
        """True if a node reads an input's value before a write to that input."""
        return is_state_copy(node) or any(root(read) in self.mutated_inputs for read in node.all_input_nodes)

    @cached_property
    def forward(self) -> tuple[fx.Node, ...]:
        """Returns the operators of the forward, in execution order."""
        return tuple(n for n in self.nodes if n.op in ("call_function", "get_attr") and n not in self.backward)

    def backward_reads(self) -> Iterator[fx.Node]:
        """Yields the tensors of the forward that the backward reads or returns, in graph order."""
        returned = set(self.backward_outputs)
        for node in self.forward:
            readers = [user for user in node.users if user in self.backward]
            # Reading only sizes needs the sizes, not the tensor.
            reads_data = any(not is_number(user) for user in readers)
            if is_tensor(node) and (reads_data or node in returned):
                yield node
