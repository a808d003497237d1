"""Operators that autograd runs outside of all compiled graphs: what they save, and the gradients of their backward.

Reads the nodes of autograd's graph (`torch/csrc/autograd/python_cpp_function.cpp`, 2.13), whose `_saved_self` and
`_input_metadata` are private.
"""

import contextlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._compile
import torch._dynamo
from torch.autograd.graph import _engine_run_backward

# Files with torch's wrappers of untraced functions, which are on the stack between a mode and its caller.
_WRAPPERS = (torch._compile.__file__, torch._dynamo.eval_frame.__file__)
# Operators that the backward formulas of `gather`, `max`, indexing and `index_select` call under a mode.
_SCATTERS = {
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_add.default,
}
_COMPILED = "CompiledFunctionBackward"
# Backwards that hold a workspace, and the saved tensor of the same size: CTC's betas are as large as its alphas
# (`aten/src/ATen/native/LossCTC.cpp`).
_AS_LARGE_AS = {"CtcLossBackward0": "_saved_result1"}
# Parts of the names of backwards whose result shares memory with their input gradient.
_VIEWS = ("AddBackward", "Alias", "Permute", "Squeeze", "TBackward", "Transpose", "Unsqueeze", "View", "Reshape")
# A function whose backward returns its input gradients unchanged: FSDP2's, which calls hooks.
_HANDS_ON = "RegisterPostBackwardFunction"


class Edge(NamedTuple):
    """A result of an operator: the operator's autograd sequence number, and the number of the result."""

    order: int
    number: int


def edges_of(results: Iterable[object]) -> dict[int, Edge]:
    """Returns the edges of results that have a gradient, by their positions."""
    tensors = ((place, each) for place, each in enumerate(results) if isinstance(each, torch.Tensor))
    return {place: Edge(order(each.grad_fn), each.output_nr) for place, each in tensors if each.grad_fn is not None}


def current_node() -> Any:
    """Returns the node whose backward runs; None outside of a backward."""
    return torch._C._current_autograd_node()


def accumulating_leaves(edges: Mapping[int, int], count: int) -> dict[int, torch.Tensor]:
    """Returns the leaves into which the running backward may accumulate gradients itself, by the keys of `edges`.

    `AccumulateGrad` must be the only reader of their gradients (`torch/csrc/autograd/functions/accumulate_grad.cpp`,
    2.9 to 2.15). Empty outside of a backward, in `torch.autograd.grad`, and with `create_graph`.

    Args:
        edges: numbers of edges of the running node.
        count: its number of edges; a node with another number is not the traced one, and has no such leaves.
    """
    node = current_node()
    if node is None or torch.is_grad_enabled() or len(node.next_functions) != count:
        return {}
    leaves: dict[int, torch.Tensor] = {}
    for key, edge in edges.items():
        following = node.next_functions[edge][0]
        leaf = getattr(following, "variable", None)
        if leaf is None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            continue
        try:
            if torch._C._will_engine_execute_node(following):
                leaves[key] = leaf
        except RuntimeError:
            # `torch.autograd.grad` returns the gradients of these leaves.
            return {}
    return leaves


def adds_in_place(earlier: torch.Tensor, gradient: torch.Tensor) -> bool:
    """True if autograd adds a gradient to an earlier one in place, with nothing but an addition."""
    is_dense = earlier.layout is torch.strided and type(earlier) is torch.Tensor
    return is_dense and (earlier.dtype, earlier.device) == (gradient.dtype, gradient.device)


def adds_gradients(function: Any) -> bool:
    """True if autograd adds two gradients of one tensor (`torch/csrc/autograd/input_buffer.cpp`, 2.13), or a C++
    backward formula computes a sum.

    Autograd adds in place if nothing else references the first gradient, but never to fake tensors. Call this directly
    from a mode's `__torch_dispatch__`.
    """
    return function is torch.ops.aten.add.Tensor and _is_called_by_autograd()


def scatters_gradient(function: Any) -> bool:
    """True if a C++ backward formula, such as that of `gather`, puts a gradient into a tensor of zeros.

    Formulas do so in place, but never under a mode (`areAnyTensorSubclassLike` in
    `torch/csrc/autograd/FunctionsManual.cpp`, 2.13). Call this directly from a mode's `__torch_dispatch__`.
    """
    return function in _SCATTERS and _is_called_by_autograd()


def _is_called_by_autograd() -> bool:
    """True if autograd's engine, or a C++ formula, has called the mode that calls this function's caller."""
    if current_node() is None:
        return False
    # The engine is not the caller if a hook, or the backward of a Python function, calls the operator.
    caller: FrameType | None = sys._getframe(3)
    while caller is not None and caller.f_code.co_filename in _WRAPPERS:
        caller = caller.f_back
    return caller is not None and caller.f_code is _engine_run_backward.__code__


def last_order() -> int:
    """Returns the autograd sequence number of the latest operator."""
    order: int = torch.autograd._get_sequence_nr() - 1
    return order


def order(node: Any) -> int:
    """Returns the autograd sequence number of a node; -1 for None."""
    return -1 if node is None else int(node._sequence_nr())


def compiled_node(results: Iterable[Any]) -> Any:
    """Returns the autograd node of the compiled graph that returned these results; None if it has no backward."""
    nodes = (each.grad_fn for each in results if isinstance(each, torch.Tensor))
    return next((node for node in nodes if type(node).__name__ == _COMPILED), None)


def checkpoint() -> object:
    """Returns an object for the innermost non-reentrant checkpoint that is active; None if there is none.

    Its backward runs the same Python code again, and compares the tensors that autograd saves (`_checkpoint_hook` in
    `torch/utils/checkpoint.py`, 2.13).
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_one = hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")
    return hooks[0] if is_one else None


def drop_unread_gradients(
    results: Sequence[Any], is_tensor: Sequence[bool], sources: Mapping[int, frozenset[int]], takes_none: bool = False
) -> None:
    """Make the backward of a compiled graph return None for arguments that get no gradient in plain PyTorch.

    AOTAutograd feeds zeros to outputs without a gradient, and so returns zero gradients for all parameters, which an
    optimizer with weight decay then shrinks.

    Args:
        results: the results of a run of the graph.
        is_tensor: for each of its arguments, whether it is a tensor.
        sources: by an argument's position, the positions of the results whose gradients its own is computed from.
        takes_none: whether the backward takes None instead of zeros.
    """
    node = compiled_node(results)
    if node is None:
        return
    numbers = {at: each.output_nr for at, each in enumerate(results) if getattr(each, "grad_fn", None) is node}

    def is_unread(place: int, given: Sequence[Any]) -> bool:
        # A result that is a view has another node, whose gradients are not known here.
        of = sources.get(place, frozenset())
        return bool(of) and of <= numbers.keys() and all(given[numbers[at]] is None for at in of)

    if takes_none:
        # `set_materialize_grads` of an `autograd.Function` (torch 2.13), which AOTAutograd leaves on.
        node.materialize_grads = False

    # Whether each argument gets no gradient in the running backward; the node may run again, with other gradients.
    unread: list[bool] = []
    hooks: list[Any] = []

    def note_unread(given: Sequence[Any]) -> None:
        unread.clear()
        if all(each is not None for each in given):
            return
        unread.extend(is_unread(place, given) for place, is_one in enumerate(is_tensor) if is_one)
        # Only if needed: with a post hook, torch holds a backward's input gradients until it has finished.
        if any(unread) and not hooks:
            hooks.append(current_node().register_hook(dropped))

    def dropped(gradients: Sequence[Any], _: Sequence[Any]) -> tuple[Any, ...] | None:
        if not any(unread) or len(gradients) != len(unread):
            return None
        return tuple(None if is_one else each for each, is_one in zip(gradients, unread, strict=True))

    node.register_prehook(note_unread)


class Gradient(NamedTuple):
    """The gradient of a tensor outside of all compiled graphs; `number` identifies its storage."""

    number: int
    shape: tuple[int, ...]
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class OutsideOperator:
    """An operator that autograd runs outside of all compiled graphs.

    Attributes:
        name: the name of its backward, `LogSoftmaxBackward0`.
        order: its autograd sequence number.
        saved: the tensors that it saves.
        workspace: a saved tensor as large as the workspace of its backward; None: it has no workspace.
        allocates: the gradients that its backward allocates.
        frees: the numbers of gradients that nothing reads after its backward.
        passed: the numbers of gradients passed to a compiled graph, with the graph's result that each belongs to.
    """

    name: str
    order: int
    saved: tuple[torch.Tensor, ...]
    workspace: torch.Tensor | None
    allocates: tuple[Gradient, ...]
    frees: tuple[int, ...]
    passed: tuple[tuple[int, Edge], ...]


def graph_of(outputs: Iterable[object]) -> tuple[set[Any], set[Edge]]:
    """Returns the nodes and edges of autograd's graph that the outputs of a forward depend on."""
    own = [output for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None]
    todo: list[Any] = [output.grad_fn for output in own]
    seen, edges = set(todo), set(edges_of(own).values())
    while todo:
        following = [(node, number) for node, number in todo.pop().next_functions if node is not None]
        edges.update(Edge(order(node), number) for node, number in following)
        new = {node for node, _ in following} - seen
        seen |= new
        todo += new
    return seen, edges


def outside_operators(of_graph: Iterable[Any]) -> list[OutsideOperator]:
    """Returns the operators that autograd runs outside of all compiled graphs, in the order of the backward.

    Args:
        of_graph: the nodes of autograd's graph.
    """
    nodes = [node for node in of_graph if type(node).__name__ not in (_COMPILED, "AccumulateGrad")]
    numbers = itertools.count()
    # The gradient by node and output position; and the number of nodes that have yet to read each gradient.
    given: dict[tuple[Any, int], Gradient] = {}
    waiting: Counter[int] = Counter()
    found = []
    for node in sorted(nodes, key=lambda node: -node._sequence_nr()):
        name = node.name()
        inputs = [given[node, place] for place in range(len(node._input_metadata)) if (node, place) in given]
        allocates, passed, summed = [], [], []
        for index, (following, place) in enumerate(node.next_functions):
            if following is None or type(following).__name__ == "AccumulateGrad":
                continue
            tensor = following._input_metadata[place]
            shape, itemsize = tuple(map(int, tensor.shape)), tensor.dtype.itemsize
            is_view = any(view in name for view in _VIEWS)
            if _HANDS_ON in name and (node, index) not in given:
                # A compiled graph's gradient, which has the same storage.
                continue
            if _HANDS_ON in name:
                gradient = given[node, index]
            elif inputs and is_view and math.prod(shape) == math.prod(inputs[0].shape):
                gradient = inputs[0]
            else:
                gradient = Gradient(next(numbers), shape, itemsize)
                allocates.append(gradient)
            if (following, place) in given:
                # Autograd adds it to the gradient that is there.
                summed.append(gradient.number)
                continue
            given[following, place] = gradient
            waiting[gradient.number] += 1
            if type(following).__name__ == _COMPILED:
                passed.append((gradient.number, Edge(order(following), place)))
        for gradient in inputs:
            waiting[gradient.number] -= 1
        done = tuple(dict.fromkeys([*summed, *(one.number for one in inputs if not waiting[one.number])]))
        saved = tuple(_saved_tensors(node))
        workspace = getattr(node, _AS_LARGE_AS.get(name, ""), None)
        found.append(OutsideOperator(name, order(node), saved, workspace, tuple(allocates), done, tuple(passed)))
    return found


def _saved_tensors(node: Any) -> list[torch.Tensor]:
    """Returns the tensors saved by a `torch.autograd.Function`, or by an operator of torch (`_saved_self`)."""
    found: list[Any] = []
    for name in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        # Raised for a tensor that was written to since.
        with contextlib.suppress(AttributeError, RuntimeError):
            value = getattr(node, name)
            found += value if isinstance(value, tuple | list) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


def gradients_of_leaves(
    node: torch.autograd.graph.Node, gradients: Sequence[torch.Tensor | None]
) -> dict[int, torch.Tensor]:
    """Returns the gradients that a node has computed for leaf tensors, by the leaves' ids (`AccumulateGrad`)."""
    leaves = [getattr(function, "variable", None) for function, _ in node.next_functions]
    pairs = zip(leaves, gradients, strict=False)
    return {id(leaf): each for leaf, each in pairs if leaf is not None and each is not None}
