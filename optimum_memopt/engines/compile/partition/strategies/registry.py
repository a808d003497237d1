"""What a strategy of the compile engine is. A new one is a new file that registers itself and its number in the plan
grammar."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, FindsCandidate
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.events import Prediction
from optimum_memopt.plans.grammar import Strategy


class MemoryStrategy(FindsCandidate, Protocol):
    """How one or several strategies of the plan grammar are carried out.

    Attributes:
        numbers: those of the plan grammar.
    """

    numbers: tuple[Strategy, ...]

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        """Change the partitioned forward and backward graphs in place.

        Args:
            modules: forward and backward.
            candidates: those that are on; there may be none.
        """

    def saves_on(self, device_type: str) -> bool:
        """Whether candidates on such a device save anything of its memory."""

    def note(self, device_type: str) -> str:
        """For the note of a row in the plan table."""

    def note_applied(self, candidates: Sequence[Candidate], prediction: Prediction, sizes: SymbolValues) -> str:
        """For the note of a row that is on; empty where there is nothing to say.

        Args:
            candidates: those that are on in one graph.
            prediction: of that graph.
            sizes: value of each of its symbols.
        """

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """Whether the plan table lists a row that is off.

        Args:
            device_type: where the activation is.
            is_recomputable: there is a row of recompute for the same cluster id.
        """


_strategies: list[MemoryStrategy] = []


def register_strategy(strategy: MemoryStrategy) -> None:
    """Add a strategy."""
    _strategies.append(strategy)
    _strategies.sort(key=lambda strategy: strategy.numbers)


def registered() -> tuple[MemoryStrategy, ...]:
    """All strategies by number, which is the order of candidates and of rewrites."""
    return tuple(_strategies)


def strategy_of(number: Strategy) -> MemoryStrategy:
    """The strategy that carries out this number of the plan grammar."""
    return next(strategy for strategy in _strategies if number in strategy.numbers)


def rewrite(modules: Modules, candidates: Iterable[Candidate]) -> None:
    """Let each strategy rewrite forward and backward for those of its candidates that are on."""
    candidates = tuple(candidates)
    for strategy in _strategies:
        strategy.rewrite(modules, tuple(c for c in candidates if c.strategy in strategy.numbers))
