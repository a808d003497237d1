"""Reads the joint graph of forward and backward: what allocates each storage, who reads it, its size. Pure.

A *storage* is named by its root, the operator that allocates it; views are followed back to it by the aliasing that
their schemas declare (a FakeTensor's own storage does not tell: functionalization creates new ones for views).
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.torch_compat import dynamo, fx_graph

# Declared without an alias, yet it never copies (aten/src/ATen/native/TensorShape.cpp).
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "lift_fresh"})
# Key of a node's meta: a host copy in a graph that runs on another device.
ON_HOST = "optimum_memopt_on_host"
# Key of a node's meta: a copy of an input that may change before the backward (see `state_copies`).
STATE_COPY = "optimum_memopt_state_copy"
# ATen's operators that multiply matrices.
MATRIX_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "mm"})
# As a graph has them: sizes, and other numbers that the tracer kept symbolic.
Number = int | torch.SymInt | torch.SymFloat | torch.SymBool


def value(node: fx.Node) -> object:
    """The value that the tracer put through: a FakeTensor, a symbolic number, or a tuple of them."""
    return node.meta.get("val")


def tensor_value(node: fx.Node) -> dynamo.FakeTensor:
    """The fake tensor of a node for which `is_tensor` holds."""
    return cast(dynamo.FakeTensor, node.meta["val"])


def first_input(node: fx.Node) -> fx.Node:
    """The first argument of an operator on a tensor or on several."""
    return cast(fx.Node, node.args[0])


def is_on_host(node: fx.Node) -> bool:
    """True for a host copy in a graph that runs elsewhere: it takes none of the device's memory."""
    return bool(node.meta.get(ON_HOST))


def is_state_copy(node: fx.Node) -> bool:
    """True for a copy of an input that may change before the backward."""
    return bool(node.meta.get(STATE_COPY))


def is_barrier(node: fx.Node) -> bool:
    """True for an operator that has a recompute wait, see `partition/strategies/recompute.py`."""
    return node.target is torch.ops.optimum_memopt.after.default


def is_tensor(node: fx.Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def is_number(node: fx.Node) -> bool:
    """A symbolic size or another symbolic number."""
    return isinstance(value(node), dynamo.SymbolicNumber)


def is_output(node: fx.Node) -> bool:
    """True where this picks one output of an operator that has several."""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """True for an operator that returns memory of its first argument."""
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
    """The node that allocates the storage that `node` lies in; an output of a multi-output operator is its own."""
    while is_view(node):
        node = first_input(node)
    return node


@dataclass(frozen=True)
class Inlined:
    """Operators whose results are held nowhere, since a compiler computes them within the kernels that read them.

    Attributes:
        operands: by name, which of `all_input_nodes` is held until the last reader instead; None: none of them.
    """

    operands: dict[str, int | None] = field(default_factory=dict)

    def is_view(self, node: fx.Node) -> bool:
        return is_view(node) or (node.name in self.operands and node.op == "call_function")

    def without(self, materialized: Iterable[fx.Node]) -> "Inlined":
        names = {node.name for node in materialized}
        return Inlined({name: operand for name, operand in self.operands.items() if name not in names})

    def root(self, node: fx.Node) -> fx.Node | None:
        """The node that allocates the storage that is held for `node`; None: there is none."""
        while (own := root(node)).name in self.operands and own.op == "call_function":
            operand = self.operands[own.name]
            if operand is None:
                return None
            node = own.all_input_nodes[operand]
        return own


def is_chunked_loss_operator(target: object) -> bool:
    """True for the operator of `loss/operator.py`."""
    return str(target) == "optimum_memopt.chunked_loss.default"


def is_chunked_loss(node: fx.Node) -> bool:
    return is_chunked_loss_operator(node.target)


def is_loss_gradient(node: fx.Node) -> bool:
    """True for an output of the chunked loss behind the first."""
    return is_output(node) and is_chunked_loss(first_input(node)) and cast(int, node.args[1]) > 0


def is_scaling(node: fx.Node, gradient: fx.Node) -> bool:
    """True for a product with a gradient of the chunked loss: as its only reader, it may do so in place."""
    is_product = node.target is torch.ops.aten.mul.Tensor and node.args[0] is gradient
    return is_product and tensor_value(node).dtype == tensor_value(gradient).dtype


def symbolic(number: Number) -> sympy.Expr:
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(int(number))


def elements(tensor: torch.Tensor) -> sympy.Expr:
    return sympy.Mul(*map(symbolic, tensor.shape))


def storage_bytes(node: fx.Node) -> sympy.Expr:
    """Bytes of the storage of a root, gaps between strides included."""
    tensor = tensor_value(node)
    if dynamo.operator_name(node.target) == "copy":
        # As large as the storage of what it is copied over, of which it may be a part.
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
        """All that depends on a gradient or was traced in the backward."""
        # All that was traced in the forward stands before the backward.
        forward = (index for index, node in enumerate(self.nodes) if fx_graph.is_tagged_forward(node))
        end_of_forward = max(forward, default=len(self.nodes))
        # But for views of its results that AOTAutograd returns, behind both (Longformer).
        returned = set(self.forward_outputs)
        for node in reversed(self.nodes[end_of_forward + 1 :]):
            returned.update(node.all_input_nodes if node in returned else ())
        dependent: set[fx.Node] = set()
        for index, node in enumerate(self.nodes):
            if node.op == "output":
                continue
            # A frozen weight that a function dequantizes anew in its backward reads no gradient. Sizes that are first
            # asked for there are the forward's all the same, so that the backward does not read a tensor for its size.
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
        """The gradient, if any, that the backward returns for each input; empty where there are not as many."""
        returned = self.outputs[self.num_fwd_outputs :]
        return dict(zip(self.inputs, returned, strict=True)) if len(returned) == len(self.inputs) else {}

    @cached_property
    def mutated_inputs(self) -> frozenset[fx.Node]:
        return fx_graph.mutated_inputs(self.module.graph)

    def is_impure(self, node: fx.Node) -> bool:
        """True where it must not run twice: it draws random numbers, reads an input that is written to in the meantime
        (running statistics), copies one that may be, or is a loss that computes its own gradients, three products with
        all classes."""
        if is_output(node):
            node = first_input(node)
        return fx_graph.is_random(node) or is_chunked_loss(node) or self.reads_former_state(node)

    def reads_former_state(self, node: fx.Node) -> bool:
        """True where it reads what an input holds before something writes to that."""
        return is_state_copy(node) or any(root(read) in self.mutated_inputs for read in node.all_input_nodes)

    @cached_property
    def forward(self) -> tuple[fx.Node, ...]:
        """Operators of the forward, in the order of execution."""
        return tuple(n for n in self.nodes if n.op in ("call_function", "get_attr") and n not in self.backward)

    def backward_reads(self) -> Iterator[fx.Node]:
        """Tensors of the forward that the backward reads or returns, in graph order."""
        returned = set(self.backward_outputs)
        for node in self.forward:
            readers = [user for user in node.users if user in self.backward]
            # A read of sizes alone needs the sizes, not the tensor.
            reads_data = any(not is_number(user) for user in readers)
            if is_tensor(node) and (reads_data or node in returned):
                yield node
