"""Names for the sizes of a batch, the same ones for the plan table and the prediction."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import sympy

from optimum_memopt.plans.table import canonical_symbols

_DIMENSION = re.compile(r"\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]$")
# Which input an axis is named by when several share it, where not the first by name.
_RANK = {"input_ids": 0, "labels": 2}


def symbol_names(sources: Mapping[sympy.Symbol, Sequence[str]]) -> dict[sympy.Symbol, str]:
    """`input_ids_dim0` of `L['kwargs']['input_ids'].size()[0]`; symbols that are no size of an input have no name."""
    names = {}
    for symbol, texts in sources.items():
        matches = [match for text in texts if (match := _DIMENSION.search(text))]
        if matches:
            first = min(matches, key=lambda match: (_RANK.get(match["input"], 1), match["input"]))
            names[symbol] = f"{first['input']}_dim{first['dim']}"
    return names


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
