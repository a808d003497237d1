"""The reference for liveness: the plainest simulation, with sympy's `subs` for every storage."""

import operator
from collections.abc import Collection, Mapping

import sympy
from torch import fx

from optimum_memopt.engines.compile.graph.joint import (
    is_on_host,
    is_tensor,
    is_view,
    root,
    storage_bytes,
    symbolic,
    value,
)
from optimum_memopt.engines.compile.memory.events import Prediction, Timeline

Sizes = Mapping[sympy.Symbol, int]

_ARITHMETIC = frozenset({"add", "div", "mul", "rsub", "sub"})


def size_of(node: fx.Node, sizes: Sizes) -> int:
    """Bytes of a root's storage for these values of the symbols; none where it lies in the host's memory."""
    return 0 if is_on_host(node) else int(storage_bytes(node).subs(sizes))


def predict(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, sizes: Sizes) -> Prediction:
    """Simulate both graphs as AOTAutograd runs them; the caller drops the outputs in between.

    Args:
        num_fwd_outputs: outputs of the forward that its caller gets; the others are handed to the backward.
        sizes: value of every symbol.
    """
    run = simulate(forward.graph, sizes)
    (output,) = forward.graph.find_nodes(op="output")
    returned = {root(node) for node in output.args[0][:num_fwd_outputs] if isinstance(node, fx.Node)}
    saved = {node.name: node for node in output.args[0][num_fwd_outputs:] if isinstance(node, fx.Node)}
    saved_roots = {root(node) for node in saved.values()}
    dropped = {node for node in returned - saved_roots if node.op == "call_function"}
    saved_bytes = run.end - sum(size_of(node, sizes) for node in dropped if is_tensor(node))
    owned, counted, gradients = [], set(), 0
    for node in backward.graph.find_nodes(op="placeholder"):
        if not is_tensor(node):
            continue
        if node.name not in saved:
            owned.append(node)
            gradients += size_of(node, sizes)
            continue
        made = root(saved[node.name])
        if made.op != "placeholder" and made not in counted:
            counted.add(made)
            owned.append(node)
    return Prediction(run, simulate(backward.graph, sizes, owned, saved_bytes + gradients), saved_bytes, gradients)


def simulate(graph: fx.Graph, sizes: Sizes, owned: Collection[fx.Node] = (), start: int = 0) -> Timeline:
    """Run the graph in its order, freeing every storage after its last use, as torch.fx's generated code does.

    Args:
        graph: functional but for copies back into inputs.
        sizes: value of every symbol.
        owned: placeholders that nobody else holds: freed after their last use. Counted in `start`.
        start: bytes held before the first operator, over what the other placeholders are.

    Returns:
        Bytes over what the placeholders that are not owned hold.
    """
    nodes = list(graph.nodes)
    last_use: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for read in node.all_input_nodes:
            last_use[root(read)] = node
    owned_roots = {root(node) for node in owned}
    freed: dict[fx.Node, list[fx.Node]] = {}
    for holder, node in last_use.items():
        freed.setdefault(node, []).append(holder)

    held, names, during = start, [], []
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        made = _allocations(node)
        held += sum(size_of(one, sizes) for one in made)
        names.append(node.name)
        during.append(held + casts(node, sizes))
        # Outputs that nobody reads go with the tuple that holds them, when its last output has been picked.
        if node not in last_use and node.op == "call_function" and not is_view(node) and is_tensor(node):
            held -= size_of(node, sizes)
        for holder in freed.get(node, ()):
            if holder.op == "placeholder" and holder not in owned_roots:
                continue
            if is_tensor(holder):
                held -= size_of(holder, sizes)
    return Timeline(tuple(names), tuple(during), held)


def casts(node: fx.Node, sizes: Sizes) -> int:
    """Bytes that an operator on the CPU holds while it runs: the operands of another dtype, cast before it computes
    (`aten/src/ATen/TensorIterator.cpp`; on other devices the kernel casts each element)."""
    if getattr(node.target, "_opname", "") not in _ARITHMETIC or value(node).device.type != "cpu":
        return 0
    own = value(node).dtype
    others = [value(one) for one in node.all_input_nodes if is_tensor(one) and value(one).dim()]
    elements = sum(sympy.Mul(*map(symbolic, one.shape)) for one in others if one.dtype != own)
    return int((sympy.sympify(elements) * own.itemsize).subs(sizes))


def _allocations(node: fx.Node) -> list[fx.Node]:
    """The roots that an operator allocates: itself, or the outputs of it that are picked."""
    if node.op != "call_function" or is_view(node):
        return []
    if isinstance(value(node), tuple | list):
        return [user for user in node.users if user.target is operator.getitem and is_tensor(user)]
    if node.target is operator.getitem or not is_tensor(node):
        return []
    return [node]
