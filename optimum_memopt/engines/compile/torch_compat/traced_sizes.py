"""Sizes while torch traces: symbols and constants, what they stand for, and what torch has assumed of them.

Seen in torch 2.13.0, and there since 2.9, unless stated otherwise.
"""

import contextlib
import copy
import functools
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv, is_concrete_int
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from optimum_memopt.engines.compile.torch_compat.recompiles import CodePlace, source_name, specialized_sizes


def _shapes_of_trace() -> ShapeEnv | None:
    # A mode has none where sizes stay the same.
    mode = getattr(TracingContext.try_get(), "fake_mode", None)
    return getattr(mode, "shape_env", None)


def constant(size: "int | torch.SymInt") -> int | None:
    """A size that is no symbol of a trace; None: it is one."""
    return int(size) if is_concrete_int(size) else None


def mark_static(tensor: torch.Tensor, dims: Iterable[int]) -> None:
    """These sizes are constants of the compiled graph; another one recompiles (`torch/_dynamo/decorators.py`)."""
    dims = tuple(dims)
    if is_traceable_wrapper_subclass(tensor) or vars(tensor):
        torch._dynamo.mark_static(tensor, list(dims))
    else:
        vars(tensor).update((name, copy.copy(mark)) for name, mark in _static_marks(dims))


@functools.cache
def _static_marks(dims: tuple[int, ...]) -> list[tuple[str, Any]]:
    """The attributes by which torch knows these sizes as constants. To copy them takes a tenth of the time, which each
    layer of each step would take."""
    marked = torch.empty([0] * (max(dims, default=-1) + 1))
    torch._dynamo.mark_static(marked, list(dims))
    return list(vars(marked).items())


def symbol_sources() -> dict[sympy.Symbol, list[str]]:
    """While a graph is partitioned: each symbol and the sizes that it stands for, as `L['input_ids'].size()[0]`.

    A symbol that turned out to equal another one is found at that one (`replacements`).
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
    """Within it whole numbers are constants of what is traced, as in any trace but one for all sizes."""
    return torch._dynamo.config.patch(specialize_int=True)


def constant_sizes() -> dict[tuple[str, int], tuple[CodePlace, ...]]:
    """While a graph is partitioned: see `specialized_sizes`."""
    return specialized_sizes(_shapes_of_trace())


def size_guards() -> list[sympy.Basic]:
    """While a graph is partitioned: what torch has assumed of sizes so far, and checks before it runs the graph."""
    shapes = _shapes_of_trace()
    return [] if shapes is None else [guard.expr for guard in shapes.guards]
