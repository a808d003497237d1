"""Names for the sizes of a batch, the same ones for the plan table and the prediction."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import sympy
import torch

from optimum_memopt.plans.table import canonical_symbols

_DIMENSION = re.compile(r"\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]$")
_SIZE = re.compile(r"\.size\(\)\[(?P<dim>\d+)\]$")
# Which input an axis is named by when several share it, where not the first by name.
_RANK = {"input_ids": 0, "labels": 2}


def symbol_names(
    sources: Mapping[sympy.Symbol, Sequence[str]],
    sizes: Mapping[sympy.Symbol, int],
    batch: Mapping[str, int],
) -> dict[sympy.Symbol, str]:
    """`input_ids_dim0` of `L['kwargs']['input_ids'].size()[0]`; symbols that are no size have no name.

    A graph behind a graph break takes what was computed before it, as `L['___stack0'].size()[1]`. Such a size has the
    name of an input's size that is equal in this batch, of the same dimension if there is one.

    Args:
        sources: what each symbol is the size of.
        sizes: value of each symbol.
        batch: sizes of the forward's inputs, by name; empty: all sizes are those of inputs.
    """
    names = {}
    for symbol, texts in sources.items():
        found = [(match["input"], int(match["dim"])) for text in texts if (match := _DIMENSION.search(text))]
        if batch:
            found = [one for one in found if _name(*one) in batch]
        dims = {int(match["dim"]) for text in texts if (match := _SIZE.search(text))}
        if found:
            names[symbol] = _name(*min(found, key=_rank))
        elif dims and (equal := [name for name, size in batch.items() if size == sizes.get(symbol)]):
            parsed = [(name, int(dim)) for name, _, dim in (one.rpartition("_dim") for one in equal)]
            names[symbol] = _name(*min(parsed, key=lambda one: (one[1] not in dims, *_rank(one))))
    return names


def bound_symbols(guards: Iterable[sympy.Basic], sizes: Mapping[sympy.Symbol, int]) -> frozenset[sympy.Symbol]:
    """The sizes that a graph was traced for, and few others: an equation in one of them fails for twice as much.

    Args:
        guards: that torch checks before it runs the graph.
        sizes: value of each symbol.
    """
    found = set()
    for guard in guards:
        symbols = guard.free_symbols if isinstance(guard, sympy.Eq) else set()
        if len(symbols) != 1 or (symbol := next(iter(symbols))) not in sizes or symbol in found:
            continue
        if guard.subs(symbol, 2 * sizes[symbol]) == sympy.false:
            found.add(symbol)
    return frozenset(found)


def input_sizes(inputs: Mapping[str, object]) -> dict[str, int]:
    """Sizes of a forward's keyword arguments that are tensors, and of those in mappings, as `input_ids_dim0`."""
    sizes: dict[str, int] = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            sizes.update((_name(name, dim), size) for dim, size in enumerate(value.shape))
        elif isinstance(value, Mapping):
            sizes.update(input_sizes(value))
    return sizes


def _name(of: str, dim: int) -> str:
    return f"{of}_dim{dim}"


def _rank(of: tuple[str, int]) -> tuple[int, str]:
    return _RANK.get(of[0], 1), of[0]


class _Graph(Protocol):
    """What a `PartitionedGraph` knows of its symbols."""

    @property
    def names(self) -> Mapping[sympy.Symbol, str]:
        """`input_ids_dim0`, where a symbol is the size of an input."""

    @property
    def sizes(self) -> Mapping[sympy.Symbol, int]:
        """Values in the first batch."""


@dataclass(frozen=True)
class SymbolNames:
    """For all graphs of one forward.

    Attributes:
        canonical: a graph's own name of a size, `attention_mask_dim0`, to the one that is shown,
            `inputs_input_ids_dim0`.
        first: each canonical name's value in the first batch.
    """

    canonical: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graphs: Iterable[_Graph], is_encoder_decoder: bool) -> "SymbolNames":
        """
        Args:
            graphs: all graphs of a forward.
            is_encoder_decoder: labels have the decoder's length (see `canonical_symbols`).
        """
        values = {
            name: graph.sizes[symbol]
            for graph in graphs
            for symbol, name in graph.names.items()
            if symbol in graph.sizes
        }
        canonical = canonical_symbols(values, is_encoder_decoder)
        return cls(canonical, {canonical.get(name, name): value for name, value in values.items()})

    def of_symbols(self, graph: _Graph) -> dict[sympy.Symbol, str]:
        """The canonical names of a graph's symbols."""
        return {symbol: self.canonical.get(name, name) for symbol, name in graph.names.items()}
