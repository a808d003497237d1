"""Sizes in a trace of torch: symbols and constants, their sources, and torch's guards on them.

Checked in torch 2.13.0, and present since 2.9, unless stated otherwise.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, is_concrete_int
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from optimum_memopt.compat.torch import without_modes
from optimum_memopt.engines.torch_compat.recompiles import CodePlace, source_name, specialized_sizes

# Channels, height and width.
_SIZES_OF_IMAGE = 3
# Types of tensors that hold no other tensors.
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Numbers in a graph: sizes, and other numbers that the tracer kept symbolic.
Number = int | torch.SymInt | torch.SymFloat | torch.SymBool


def symbolic(number: Number) -> sympy.Expr:
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(int(number))


def elements(tensor: torch.Tensor) -> sympy.Expr:
    """Returns the number of a tensor's elements."""
    return sympy.Mul(*map(symbolic, tensor.shape))


def _shapes_of_trace() -> ShapeEnv | None:
    # A fake mode has no shape environment if all sizes are static.
    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    return getattr(mode, "shape_env", None)


def constant(size: "int | torch.SymInt") -> int | None:
    """Returns a size as a number; None if it is a symbol of a trace."""
    return int(size) if is_concrete_int(size) else None


class StaticSizes:
    """A context in which sizes of tensors are constants of the compiled graph; others recompile.

    The marks are removed afterwards: torch guards on their absence (`torch/_dynamo/guards.py`, since 2.13), and would
    recompile the code around the context for a parameter, or for a batch that comes again.

    A class, since it is entered for each layer in each step: `with_attributes` takes twice the time.

    Args:
        sizes: tensors with their dimensions.
    """

    def __init__(self, sizes: Iterable[tuple[torch.Tensor, Sequence[int]]]) -> None:
        self._sizes = sizes
        # Attributes of a tensor, the name of a mark among them, and its former value.
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        for tensor, dims in self._sizes:
            self._mark(tensor, tuple(dims))

    def _mark(self, tensor: torch.Tensor, dims: tuple[int, ...]) -> None:
        """Mark these sizes as static, in addition to existing marks. Copying marks takes a tenth of the time of
        `mark_static`."""
        # Most tensors are of no subclass, for which the test takes 0.1 us instead of 1.
        if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
            for each in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(each, torch.Tensor) and each.dim() == tensor.dim():
                    self._mark(each, dims)
        held = vars(tensor)
        for name, mark in _known_marks(dims).items():
            earlier = held.get(name)
            self._before.append((held, name, earlier))
            held[name] = earlier | mark if isinstance(earlier, set) else copy.copy(mark)

    def __exit__(self, *_: object) -> None:
        for held, name, earlier in reversed(self._before):
            if earlier is None:
                held.pop(name, None)
            else:
                held[name] = earlier


class ImageSizes:
    """Makes image sizes constants of a forward's graphs, until it gets images of other sizes.

    Nearly all runs have images of one size. A symbolic size passes through each strided convolution, and torch
    simplifies ever longer fractions of it: the first step of a DenseNet took four minutes. When another size comes,
    the forward recompiles with symbols for all sizes.

    Every floating-point tensor with four or more dimensions counts as images, unless its name says that it is a mask;
    its last three dimensions are channels, height and width.
    """

    def __init__(self) -> None:
        # By the argument's name; None: its sizes differ.
        self._known: dict[str, tuple[int, ...] | None] = {}

    def constant(self, inputs: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which constant sizes are marked; the marks are removed afterwards.

        Args:
            inputs: all arguments of the forward by name.
        """
        return StaticSizes(self._constant_dims(inputs))

    def _constant_dims(self, inputs: Mapping[str, Any]) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        for name, image in inputs.items():
            if not _is_image(name, image):
                continue
            sizes = tuple(image.shape[-_SIZES_OF_IMAGE:])
            if self._known.setdefault(name, sizes) != sizes:
                self._known[name] = None
            else:
                yield image, tuple(range(image.dim() - _SIZES_OF_IMAGE, image.dim()))


def _is_image(name: str, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() <= _SIZES_OF_IMAGE or "mask" in name:
        return False
    return value.is_floating_point() and not is_traceable_wrapper_subclass(value)


@functools.cache
def _known_marks(dims: tuple[int, ...]) -> dict[str, Any]:
    # Under a fake mode, the tensor would have attributes of this mode, too.
    with without_modes():
        marked = torch.empty([0] * (max(dims, default=-1) + 1))
    torch._dynamo.mark_static(marked, list(dims))
    return vars(marked)


def symbol_sources() -> dict[sympy.Symbol, list[str]]:
    """Returns, while a graph is partitioned, the sources of each symbol, as `L['input_ids'].size()[0]`.

    The sources of a symbol that equals another one are listed under the other (`replacements`).
    """
    shapes = _shapes_of_trace()
    texts: dict[sympy.Symbol, list[str]] = {}
    if shapes is None:
        return texts
    for symbol, sources in shapes.var_to_sources.items():
        names = list(map(source_name, sources))
        same = shapes.replacements.get(symbol, symbol)
        texts.setdefault(same if same.is_Symbol else symbol, []).extend(names)
    return texts


def constant_numbers() -> contextlib.AbstractContextManager[None]:
    """Make Python integers constants of a trace, as in any trace that is not dynamic."""
    return torch._dynamo.config.patch(specialize_int=True)


def constant_sizes() -> dict[tuple[str, int], tuple[CodePlace, ...]]:
    """Returns, while a graph is partitioned, the `specialized_sizes` of its trace."""
    return specialized_sizes(_shapes_of_trace())


def size_guards() -> list[sympy.Basic]:
    """Returns, while a graph is partitioned, the guards on sizes so far; torch checks them before it runs the
    graph."""
    shapes = _shapes_of_trace()
    return [] if shapes is None else [guard.expr for guard in shapes.guards]


def make_unit_sizes_constant(graph: fx.Graph) -> None:
    """Make the symbols in computed sizes of 0 or 1 constants, while a joint graph is partitioned for inductor.

    With a size such as `min(12, length) - 8`, which is 1 for 9 tokens, inductor's backward reads uninitialized memory:
    with all activations recomputed, stock torch 2.13 computes gradients of 1e35 for MiniMax's linear attention. The
    guards of torch already exclude other batches from such a graph.
    """
    shapes = _shapes_of_trace()
    if shapes is None:
        return
    values = tree_leaves([node.meta.get("val") for node in graph.nodes])
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    sizes: Iterable[Any] = itertools.chain.from_iterable(tensor.shape for tensor in tensors)
    symbolic = {size.node.expr: size.node.hint for size in sizes if isinstance(size, torch.SymInt)}
    for expression, hint in symbolic.items():
        for symbol in expression.free_symbols if hint in (0, 1) and not expression.is_Symbol else ():
            # Evaluated for a graph, a symbol becomes a constant of it.
            shapes.evaluate_expr(symbol)
