"""The sizes that a plan is made for: those of the run's largest batch, where it is known. Pure."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from optimum_memopt.engines.run import LargestBatch
from optimum_memopt.errors import MemOptError

# Inputs with a token a column; labels of an encoder-decoder have the decoder's length, which the data does not tell.
_BY_TOKENS = ("input_ids_dim1", "attention_mask_dim1", "token_type_ids_dim1", "position_ids_dim1")
# Before the names that the plan table shows.
_SHOWN = "inputs_"
_Symbol = TypeVar("_Symbol")


def is_rows(name: str) -> bool:
    """Whether a name of a size, `input_ids_dim0`, is that of a batch's rows."""
    return name.rpartition("_")[2] == "dim0"


def rows_of(sizes: Mapping[_Symbol, int], names: Mapping[_Symbol, str]) -> dict[_Symbol, int]:
    """Those of a graph's sizes that are a batch's rows.

    Args:
        sizes: by symbol.
        names: of the symbols, `input_ids_dim0`.
    """
    return {symbol: size for symbol, size in sizes.items() if is_rows(names.get(symbol, ""))}


def is_length(name: str) -> bool:
    """Whether a name of a size, `input_ids_dim1`, is that of a batch's tokens."""
    return name.removeprefix(_SHOWN) in _BY_TOKENS


def larger_sizes(
    sizes: Mapping[_Symbol, int], names: Mapping[_Symbol, str], largest: LargestBatch | None
) -> dict[_Symbol, int]:
    """The sizes of a first batch, raised to those of the largest.

    Args:
        sizes: of the first batch, by symbol.
        names: of the symbols, `input_ids_dim0` or `inputs_input_ids_dim0`.
        largest: None: it is not known.
    """
    if largest is None:
        return dict(sizes)
    wanted = {
        symbol: largest.rows if is_rows(name) else largest.length
        for symbol, name in names.items()
        if is_rows(name) or is_length(name)
    }
    return {symbol: max(size, wanted.get(symbol, 0)) for symbol, size in sizes.items()}


def largest_of(sizes: Mapping[str, int]) -> LargestBatch | None:
    """A batch with these sizes, by name; None where no size is its length."""
    rows = [size for name, size in sizes.items() if is_rows(name)]
    lengths = [size for name, size in sizes.items() if is_length(name)]
    return LargestBatch(max(rows, default=1), max(lengths)) if lengths else None


def plain_sizes(known: Mapping[str, int], batch_size: int | None, seq_len: int | None) -> dict[str, int]:
    """Sizes of a batch by the names of `known`, from what Trainer's users call them.

    Args:
        known: sizes of the first batch, by name.
        batch_size: rows; None: as they are.
        seq_len: tokens of the longest row; None: as they are.

    Raises:
        MemOptError: a size that is no symbol of the graph.
    """
    sizes = {}
    for plain, size, is_it in (("batch_size", batch_size, is_rows), ("seq_len", seq_len, is_length)):
        names = [name for name in known if is_it(name)]
        if size is None:
            continue
        if not names:
            raise MemOptError(f"{plain}={size}: no size that can be changed; those are {', '.join(known) or 'none'}")
        sizes.update(dict.fromkeys(names, size))
    return sizes


def length_name(names: Iterable[str]) -> str:
    """The name of the size that is a batch's length; empty where there is none."""
    return next((name for name in names if is_length(name)), "")


def is_covered(sizes: Mapping[str, int], largest: LargestBatch) -> bool:
    """Whether a batch has no more rows and no more tokens than `largest`; other sizes count for nothing."""
    return all(
        size <= (largest.rows if is_rows(name) else largest.length)
        for name, size in sizes.items()
        if is_rows(name) or is_length(name)
    )
