"""Symbolic sizes compiled to integer arithmetic: sympy's `subs` takes 0.1 ms and more for each expression. Pure."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import sympy
import torch

from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.errors import MemOptError

SymbolValues = Mapping[sympy.Symbol, int]

# Keyed by name, since torch's own functions are in a private module (`torch/utils/_sympy/functions.py`, 2.13).
_OPERATORS: dict[str, Callable[[list[Any]], Any]] = {
    "Add": sum,
    "Mul": math.prod,
    "Max": max,
    "Min": min,
    **dict.fromkeys(("Mod", "PythonMod"), lambda arguments: operator.mod(*arguments)),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), lambda arguments: operator.floordiv(*arguments)),
    "floor": lambda arguments: math.floor(arguments[0]),
    "ceiling": lambda arguments: math.ceil(arguments[0]),
    # As a fraction, since a negative power of an integer is a float.
    "Pow": lambda arguments: Fraction(arguments[0]) ** arguments[1],
}


# Returns the exact value of each expression; raises `KeyError` if a symbol has no value.
CompiledSizes = Callable[[SymbolValues], list[int]]


def compile_sizes(expressions: Iterable[sympy.Expr]) -> CompiledSizes:
    """Compile expressions to steps that share common terms; functions that are not in `_OPERATORS` stay sympy's."""
    # A function and the indices of the earlier steps whose values it takes; None: it takes the symbols' values.
    steps: list[tuple[Callable[[Any], Any], tuple[int, ...] | None]] = []
    numbers: dict[sympy.Basic, int] = {}

    def add(expression: sympy.Basic) -> int:
        if expression not in numbers:
            function = _leaf(expression)
            arguments = None if function else tuple(map(add, expression.args))
            numbers[expression] = len(steps)
            steps.append((function or _OPERATORS[type(expression).__name__], arguments))
        return numbers[expression]

    results = tuple(map(add, expressions))

    def evaluate(values: SymbolValues) -> list[int]:
        computed: list[Any] = []
        for function, arguments in steps:
            computed.append(function(values if arguments is None else [computed[index] for index in arguments]))
        return [int(computed[index]) for index in results]

    return evaluate


def formula(size: sympy.Expr) -> str:
    """Returns a number of bytes as text, with common factors pulled out.

    torch computes strides as `Max(1, n)`; no dimension of a batch is 0.
    """

    def is_stride(part: sympy.Basic) -> bool:
        return type(part).__name__ == "Max" and len(part.args) == 2 and 1 in part.args

    def dimension(stride: sympy.Basic) -> sympy.Basic:
        return next(each for each in stride.args if each != 1)

    return str(sympy.factor_terms(sympy.expand(size.replace(is_stride, dimension))))


def _leaf(expression: sympy.Basic) -> Callable[[SymbolValues], Any] | None:
    """Returns a function from symbols' values to an expression's value; None if it is computed from its terms."""
    if isinstance(expression, sympy.Symbol):
        return operator.itemgetter(expression)
    if isinstance(expression, sympy.Rational):
        number = int(expression) if expression.is_Integer else Fraction(expression.p, expression.q)
        return lambda values: number
    is_root = isinstance(expression, sympy.Pow) and not expression.exp.is_Integer
    if type(expression).__name__ in _OPERATORS and not is_root:
        return None

    def substituted(values: SymbolValues) -> Fraction | float:
        result = expression.subs(values)
        return Fraction(result.p, result.q) if isinstance(result, sympy.Rational) else float(result)

    return substituted


_SIZE = re.compile(r"(?:\['(?P<input>\w+)'\])?\.size\(\)\[(?P<dim>\d+)\]$")
# The order in which inputs name an axis that several share; inputs of equal rank are ordered by name.
_RANK = {"input_ids": 0, "labels": 2}
# Inputs with one column per token; labels of an encoder-decoder have the decoder's length, which the data does not
# show.
_TOKENS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids"})
_BY_TOKENS = frozenset(f"{name}_dim1" for name in _TOKENS)


def symbol_names(
    sources: Mapping[sympy.Symbol, Sequence[str]], sizes: Mapping[sympy.Symbol, int], batch: Mapping[str, int]
) -> dict[sympy.Symbol, str]:
    """Returns the symbols' names, `input_ids_dim0` for `L['kwargs']['input_ids'].size()[0]`; only sizes have names.

    A graph after a graph break takes tensors computed before it, such as `L['___stack0'].size()[1]`, and the graph of
    a module that is compiled by itself takes the module's arguments, which may have an input's name and another shape.
    Such a size gets the name of an input's size that is equal in this batch: preferably of the same input, counting
    tokens and their mask as one, and then of the same dimension.

    Args:
        sources: the sources of each symbol's value.
        sizes: the symbols' values in this batch.
        batch: sizes of the forward's inputs, by name; empty: all sizes are those of inputs.
    """
    names = {}
    for symbol, texts in sources.items():
        parts = [(match["input"], int(match["dim"])) for text in texts if (match := _SIZE.search(text))]
        equal = [name for name, size in batch.items() if size == sizes.get(symbol)]
        axes = [axis for axis in parts if axis[0] and (not batch or _name(*axis) in equal)]
        if axes:
            names[symbol] = _name(*min(axes, key=_rank))
        elif parts and equal:
            inputs, dims = map(set, zip(*parts, strict=True))
            if inputs & _TOKENS:
                inputs |= _TOKENS
            parsed = [(name, int(dim)) for name, _, dim in (axis.rpartition("_dim") for axis in equal)]
            nearest = min(parsed, key=lambda axis: (axis[0] not in inputs, axis[1] not in dims, *_rank(axis)))
            names[symbol] = _name(*nearest)
    return names


def bound_symbols(guards: Iterable[sympy.Basic], sizes: Mapping[sympy.Symbol, int]) -> frozenset[sympy.Symbol]:
    """Returns the sizes for which a graph is specialized: an equality guard on each fails at twice its value."""
    bound = set()
    for guard in guards:
        symbols = guard.free_symbols if isinstance(guard, sympy.Eq) else set()
        if len(symbols) != 1 or (symbol := next(iter(symbols))) not in sizes or symbol in bound:
            continue
        if guard.subs(symbol, 2 * sizes[symbol]) == sympy.false:
            bound.add(symbol)
    return frozenset(bound)


def input_sizes(inputs: Mapping[str, object]) -> dict[str, int]:
    """Returns the sizes of tensors among a forward's keyword arguments, also in mappings, by `input_ids_dim0`."""
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


# Prefix of the names in the plan table.
_SHOWN = "inputs_"
_Symbol = TypeVar("_Symbol")


def is_rows(name: str) -> bool:
    """True for the name of a batch's rows, `input_ids_dim0`."""
    return name.rpartition("_")[2] == "dim0"


def rows_of(sizes: Mapping[_Symbol, int], names: Mapping[_Symbol, str]) -> dict[_Symbol, int]:
    """Returns the sizes of a graph that are a batch's rows."""
    return {symbol: size for symbol, size in sizes.items() if is_rows(names.get(symbol, ""))}


def is_length(name: str) -> bool:
    """True for the name of a batch's tokens, `input_ids_dim1`."""
    return name.removeprefix(_SHOWN) in _BY_TOKENS


def larger_sizes(
    sizes: Mapping[_Symbol, int], names: Mapping[_Symbol, str], largest: LargestBatch | None
) -> dict[_Symbol, int]:
    """Returns a first batch's sizes, raised to those of the largest batch; `largest` None: it is not known."""
    bounds = {} if largest is None else _bounds(largest, names)
    return {symbol: max(size, bounds.get(symbol, 0)) for symbol, size in sizes.items()}


def is_covered(sizes: Mapping[str, int], largest: LargestBatch) -> bool:
    """True if a batch has no more rows and no more tokens than `largest`; other sizes are ignored."""
    return all(sizes[name] <= bound for name, bound in _bounds(largest, {name: name for name in sizes}).items())


def _bounds(largest: LargestBatch, names: Mapping[_Symbol, str]) -> dict[_Symbol, int]:
    """Returns the largest batch's rows or tokens for each symbol that is one of these."""
    rows = {symbol: largest.rows for symbol, name in names.items() if is_rows(name)}
    return rows | {symbol: largest.length for symbol, name in names.items() if is_length(name)}


def shaped_as(largest: LargestBatch, sizes: Mapping[str, int]) -> LargestBatch:
    """Returns the largest batch in the format of a batch with these sizes: with padded rows, or all in one row."""
    rows, length = (sizes.get(f"input_ids_dim{dim}", 0) for dim in (0, 1))
    if largest.rows > 1 and rows == 1 and length > largest.length:
        return LargestBatch(1, largest.tokens, flattened=largest.rows)
    return largest


def largest_of(sizes: Mapping[str, int]) -> LargestBatch | None:
    """Returns a batch with these named sizes; None if no size is its length."""
    rows = [size for name, size in sizes.items() if is_rows(name)]
    lengths = [size for name, size in sizes.items() if is_length(name)]
    return LargestBatch(max(rows, default=1), max(lengths)) if lengths else None


def plain_sizes(first: Mapping[str, int], batch_size: int | None, seq_len: int | None) -> dict[str, int]:
    """Returns new sizes by the names in `first`, from the names that Trainer's users know; None: unchanged.

    Raises:
        MemOptError: a size that is no symbol of the graph.
    """
    sizes = {}
    for plain, size, is_it in (("batch_size", batch_size, is_rows), ("seq_len", seq_len, is_length)):
        names = [name for name in first if is_it(name)]
        if size is None:
            continue
        if not names:
            raise MemOptError(f"{plain}={size}: no size that can be changed; those are {', '.join(first) or 'none'}")
        sizes.update(dict.fromkeys(names, size))
    return sizes


def length_name(names: Iterable[str]) -> str:
    """Returns the name of the size that is a batch's length; empty if there is none."""
    return next((name for name in names if is_length(name)), "")
