"""The sizes that a plan is made for: those of the run's largest batch, where it is known. Pure."""

from collections.abc import Mapping
from typing import TypeVar

from optimum_memopt.engines.base import LargestBatch

# Inputs with a token a column; labels of an encoder-decoder have the decoder's length, which the data does not tell.
_BY_TOKENS = ("input_ids_dim1", "attention_mask_dim1", "token_type_ids_dim1", "position_ids_dim1")
_Symbol = TypeVar("_Symbol")


def is_rows(name: str) -> bool:
    """Whether a graph's own name of a size, `input_ids_dim0`, is that of a batch's rows."""
    return name.rpartition("_")[2] == "dim0"


def larger_sizes(
    sizes: Mapping[_Symbol, int], names: Mapping[_Symbol, str], largest: LargestBatch | None
) -> dict[_Symbol, int]:
    """The sizes of a first batch, raised to those of the largest.

    Args:
        sizes: of the first batch, by symbol.
        names: of the symbols, `input_ids_dim0`.
        largest: None: it is not known.
    """
    if largest is None:
        return dict(sizes)
    wanted = {
        symbol: largest.rows if is_rows(name) else largest.length
        for symbol, name in names.items()
        if is_rows(name) or name in _BY_TOKENS
    }
    return {symbol: max(size, wanted.get(symbol, 0)) for symbol, size in sizes.items()}
