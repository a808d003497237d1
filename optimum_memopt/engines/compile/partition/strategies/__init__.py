"""The protocol of strategies. A new one is a new file that registers itself and its number in the plan grammar."""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from typing import Protocol

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, FindsCandidate
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.events import Prediction
from optimum_memopt.plans.grammar import Strategy


class MemoryStrategy(FindsCandidate, Protocol):
    """Carries out one or several strategies of the plan grammar."""

    numbers: tuple[Strategy, ...]

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        """Change the partitioned forward and backward graphs in place; there may be no candidates that are on."""

    def saves_on(self, device_type: str) -> bool:
        """True where candidates on such a device save any of its memory."""
        return True

    def note(self, device_type: str) -> str:
        """For the note of a row in the plan table; empty where there is nothing to say."""
        return ""

    def note_applied(self, candidates: Sequence[Candidate], prediction: Prediction[str], sizes: SymbolValues) -> str:
        """For the note of a row that is on, in one graph; empty where there is nothing to say."""
        return ""

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """True where the plan table lists a row that is off.

        Args:
            is_recomputable: there is a row of recompute for the same cluster id.
        """
        return True


_strategies: list[MemoryStrategy] = []


def register_strategy(strategy: MemoryStrategy) -> None:
    """Add a strategy."""
    _strategies.append(strategy)
    _strategies.sort(key=lambda strategy: strategy.numbers)


def registered() -> tuple[MemoryStrategy, ...]:
    """All strategies by number, which is the order of candidates and of rewrites."""
    return tuple(_strategies)


def strategy_of(number: Strategy) -> MemoryStrategy:
    """The strategy that carries out a number of the plan grammar."""
    return next(strategy for strategy in _strategies if number in strategy.numbers)


def rewrite(modules: Modules, candidates: Iterable[Candidate]) -> None:
    """Let each strategy rewrite forward and backward for those of its candidates that are on."""
    candidates = tuple(candidates)
    for strategy in _strategies:
        strategy.rewrite(modules, tuple(c for c in candidates if c.strategy in strategy.numbers))


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
