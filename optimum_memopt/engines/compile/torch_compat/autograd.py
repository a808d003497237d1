"""Operators that autograd runs outside of all compiled graphs: what they save, and the gradients of their backward.

Read from the nodes of autograd's graph (`torch/csrc/autograd/python_cpp_function.cpp`, 2.13), whose `_saved_self` and
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

# Their wrappers of functions that are not to be traced stand between a mode and its caller.
_WRAPPERS = (torch._compile.__file__, torch._dynamo.eval_frame.__file__)
_COMPILED = "CompiledFunctionBackward"
# Of operators whose backward holds a buffer what is as large: CTC's has betas of the size of its alphas
# (`aten/src/ATen/native/LossCTC.cpp`).
_AS_LARGE_AS = {"CtcLossBackward0": "_saved_result1"}
# Operators whose backward returns memory of what it is given.
_VIEWS = ("AddBackward", "Alias", "Permute", "Squeeze", "TBackward", "Transpose", "Unsqueeze", "View", "Reshape")
# Functions whose backward returns each gradient that it is given: FSDP2's, which calls hooks.
_HANDS_ON = "RegisterPostBackwardFunction"


def order_of(results: Iterable[object]) -> int:
    """The place in the order of autograd's operators of the one that returned these; -1: none that it knows."""
    return max((order(result.grad_fn) for result in results if isinstance(result, torch.Tensor)), default=-1)


def current_node() -> Any:
    """The node whose backward runs; None outside of a backward."""
    return torch._C._current_autograd_node()


def adds_gradients(function: Any) -> bool:
    """True where autograd adds two gradients of one tensor (`torch/csrc/autograd/input_buffer.cpp`, 2.13), or where a
    formula of a backward in C++ has a sum. Autograd adds in place where nothing else has the first gradient, but never
    to fake tensors. To be asked by the method that a mode dispatches to."""
    if function is not torch.ops.aten.add.Tensor or current_node() is None:
        return False
    # Not called by a hook, or by the backward of a Python function.
    caller: FrameType | None = sys._getframe(2)
    while caller is not None and caller.f_code.co_filename in _WRAPPERS:
        caller = caller.f_back
    return caller is not None and caller.f_code is _engine_run_backward.__code__


def last_order() -> int:
    """The place in the order of autograd's operators of the latest one."""
    order: int = torch.autograd._get_sequence_nr() - 1
    return order


def order(node: Any) -> int:
    """The place of a node in the order of autograd's operators; -1 without one."""
    return -1 if node is None else int(node._sequence_nr())


def compiled_node(results: Iterable[Any]) -> Any:
    """The node of the compiled graph that returned these; None where it has no backward."""
    nodes = (each.grad_fn for each in results if isinstance(each, torch.Tensor))
    return next((node for node in nodes if type(node).__name__ == _COMPILED), None)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor, or a view of it, was written to under autograd's eyes."""
    version: int = tensor._version
    return version


def checkpoint() -> object:
    """The innermost checkpoint that this runs in, where it is not reentrant; None: it runs in none.

    Its backward runs the same Python code again, and compares what autograd saves (`_checkpoint_hook` in
    `torch/utils/checkpoint.py`, 2.13).
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_one = hooks is not None and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")
    return hooks[0] if is_one else None


def drop_unread_gradients(
    results: Sequence[Any], args: Sequence[Any], sources: Mapping[int, frozenset[int]], takes_none: bool = False
) -> None:
    """Have the backward of a compiled graph return no gradients where plain PyTorch has none.

    AOTAutograd feeds zeros to outputs that got no gradient, and so returns zeros to all parameters, which an optimizer
    with weight decay shrinks.

    Args:
        results: of the run of the graph with `args`.
        sources: for the place of an argument, those of the results whose gradients its own is computed from.
        takes_none: the backward takes None in the place of zeros.
    """
    node = compiled_node(results)
    if node is None:
        return
    numbers = {at: each.output_nr for at, each in enumerate(results) if getattr(each, "grad_fn", None) is node}
    is_tensor = [isinstance(arg, torch.Tensor) for arg in args]

    def is_unread(place: int, given: Sequence[Any]) -> bool:
        # A result that is a view has a node of its own, whose gradients are not seen here.
        of = sources.get(place, frozenset())
        return bool(of) and of <= numbers.keys() and all(given[numbers[at]] is None for at in of)

    if takes_none:
        # `set_materialize_grads` of an `autograd.Function` (torch 2.13), which AOTAutograd leaves on.
        node.materialize_grads = False

    def add_where_needed(given: Sequence[Any]) -> None:
        # Not always: where there is such a hook, torch holds what a backward is given until it is done.
        if all(each is not None for each in given):
            return
        unread = [is_unread(place, given) for place, is_one in enumerate(is_tensor) if is_one]
        if not any(unread):
            return

        def dropped(gradients: Sequence[Any], _: Sequence[Any]) -> tuple[Any, ...] | None:
            if len(gradients) != len(unread):
                return None
            return tuple(None if is_one else each for each, is_one in zip(gradients, unread, strict=True))

        current_node().register_hook(dropped)

    node.register_prehook(add_where_needed)


class Gradient(NamedTuple):
    """The gradient of a tensor outside of all compiled graphs; `number` is that of its storage."""

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
        name: of its backward, `LogSoftmaxBackward0`.
        order: its place among the operators of the forward.
        workspace: a saved one that is as large as what its backward holds while it runs; None: that holds nothing.
        allocates: gradients that its backward computes.
        frees: numbers of those that nothing reads behind it.
        passed: numbers of those that are given to a compiled graph, with the graph's order and the output's position.
    """

    name: str
    order: int
    saved: tuple[torch.Tensor, ...]
    workspace: torch.Tensor | None
    allocates: tuple[Gradient, ...]
    frees: tuple[int, ...]
    passed: tuple[tuple[int, int, int], ...]


def outside_operators(outputs: Iterable[object]) -> list[OutsideOperator]:
    """The operators that autograd runs outside of all compiled graphs, in the order of the backward.

    Args:
        outputs: of a forward; what they do not depend on is not found.
    """
    todo: list[Any] = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn]
    seen = set(todo)
    while todo:
        new = {node for node, _ in todo.pop().next_functions if node is not None} - seen
        seen |= new
        todo += new
    nodes = [node for node in seen if type(node).__name__ not in (_COMPILED, "AccumulateGrad")]
    numbers = itertools.count()
    # By node and place the gradient that it is given; and for how many nodes a gradient waits.
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
                # That of a compiled graph, which is one of the same storage.
                continue
            if _HANDS_ON in name:
                gradient = given[node, index]
            elif inputs and is_view and math.prod(shape) == math.prod(inputs[0].shape):
                gradient = inputs[0]
            else:
                gradient = Gradient(next(numbers), shape, itemsize)
                allocates.append(gradient)
            if (following, place) in given:
                # Added to the other one.
                summed.append(gradient.number)
                continue
            given[following, place] = gradient
            waiting[gradient.number] += 1
            if type(following).__name__ == _COMPILED:
                passed.append((gradient.number, following._sequence_nr(), place))
        for gradient in inputs:
            waiting[gradient.number] -= 1
        done = tuple(dict.fromkeys([*summed, *(one.number for one in inputs if not waiting[one.number])]))
        saved, order = tuple(_saved_tensors(node)), node._sequence_nr()
        workspace = getattr(node, _AS_LARGE_AS.get(name, ""), None)
        found.append(OutsideOperator(name, order, saved, workspace, tuple(allocates), done, tuple(passed)))
    return found


def _saved_tensors(node: Any) -> list[torch.Tensor]:
    """The tensors that a `torch.autograd.Function` has saved, or one of torch's own (`_saved_self`)."""
    found: list[Any] = []
    for name in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        # One that was written to since.
        with contextlib.suppress(AttributeError, RuntimeError):
            value = getattr(node, name)
            found += value if isinstance(value, tuple | list) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]


def gradients_of_leaves(
    node: torch.autograd.graph.Node, gradients: Sequence[torch.Tensor | None]
) -> dict[int, torch.Tensor]:
    """The gradients that a function has computed for leaves, by the ids of these (torch's `AccumulateGrad`)."""
    leaves = [getattr(function, "variable", None) for function, _ in node.next_functions]
    pairs = zip(leaves, gradients, strict=False)
    return {id(leaf): each for leaf, each in pairs if leaf is not None and each is not None}
