"""Symbolic sizes compiled to integer arithmetic: sympy's `subs` takes 0.1 ms and more for each expression. Pure."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy

SymbolValues = Mapping[sympy.Symbol, int]

# By name: torch's own functions are in a private module (`torch/utils/_sympy/functions.py`, 2.13).
_OPERATORS: dict[str, Callable[[list[Any]], Any]] = {
    "Add": sum,
    "Mul": math.prod,
    "Max": max,
    "Min": min,
    "Mod": lambda arguments: operator.mod(*arguments),
    "PythonMod": lambda arguments: operator.mod(*arguments),
    "FloorDiv": lambda arguments: operator.floordiv(*arguments),
    "CleanDiv": lambda arguments: operator.floordiv(*arguments),
    "floor": lambda arguments: math.floor(arguments[0]),
    "ceiling": lambda arguments: math.ceil(arguments[0]),
    # Of a fraction, since a negative power of an integer is a float.
    "Pow": lambda arguments: Fraction(arguments[0]) ** arguments[1],
}


@dataclass(frozen=True)
class CompiledSizes:
    """Expressions as a list of steps that share common terms.

    Attributes:
        steps: a function and which earlier steps' values it is called with; with the symbols' values where None.
        results: the step of each expression.
    """

    steps: tuple[tuple[Callable[[Any], Any], tuple[int, ...] | None], ...]
    results: tuple[int, ...]

    def __call__(self, values: SymbolValues) -> list[int]:
        """The value of each expression, exact.

        Raises:
            KeyError: a symbol without a value.
        """
        found: list[Any] = []
        for function, arguments in self.steps:
            found.append(function(values if arguments is None else [found[index] for index in arguments]))
        return [int(found[index]) for index in self.results]


def compile_sizes(expressions: Iterable[sympy.Expr]) -> CompiledSizes:
    """Compile expressions in the sizes of a batch; a term with another function than `_OPERATORS` stays sympy's."""
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
    return CompiledSizes(tuple(steps), results)


def _leaf(expression: sympy.Basic) -> Callable[[SymbolValues], Any] | None:
    """What gives an expression's value without that of its terms; None where their values are enough."""
    if isinstance(expression, sympy.Symbol):
        return operator.itemgetter(expression)
    if isinstance(expression, sympy.Rational):
        number = int(expression) if expression.is_Integer else Fraction(expression.p, expression.q)
        return lambda values: number
    is_root = isinstance(expression, sympy.Pow) and not expression.exp.is_Integer
    if type(expression).__name__ in _OPERATORS and not is_root:
        return None
    return lambda values: _substituted(expression, values)


def _substituted(expression: sympy.Basic, values: SymbolValues) -> int | Fraction | float:
    found = expression.subs(values)
    return Fraction(found.p, found.q) if isinstance(found, sympy.Rational) else float(found)
