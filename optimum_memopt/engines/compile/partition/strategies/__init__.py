"""The protocol of strategies, and their candidates in a joint graph. A new strategy is a new file that registers it
with its number in the plan grammar."""

import importlib
import pkgutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import (
    Candidate,
    RecomputeChain,
    producing_operator,
    recompute_chain,
)
from optimum_memopt.engines.compile.graph.joint import JointGraph, is_chunked_loss
from optimum_memopt.engines.compile.graph.naming import cluster_id, dropout_of
from optimum_memopt.engines.compile.graph.saved_activations import (
    SavedActivation,
    is_generator_state,
    is_negligible,
    is_statistic,
)
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.graph_events import Prediction
from optimum_memopt.plans.grammar import Strategy


class MemoryStrategy(Protocol):
    """Implements one or several strategies of the plan grammar."""

    numbers: tuple[Strategy, ...]

    def candidate(
        self, activation: SavedActivation, chain: RecomputeChain | None, cluster_id: str, size_hints: SymbolValues
    ) -> Candidate | None:
        """Returns the activation's candidate, or None if it saves nothing.

        Args:
            chain: how to recompute the activation; None: it must not be recomputed.
        """

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        """Change the partitioned forward and backward graphs in place for the candidates that are on, if any."""

    def saves_on(self, device_type: str) -> bool:
        """True if candidates on such a device save any of its memory."""
        return True

    def note(self, device_type: str) -> str:
        """Returns the note for a row of the plan table; empty: none."""
        return ""

    def note_applied(self, candidates: Sequence[Candidate], prediction: Prediction[str], sizes: SymbolValues) -> str:
        """Returns the note for a row that is on, in one graph; empty: none."""
        return ""

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """True if the plan table lists a row that is off.

        Args:
            is_recomputable: the table has a recompute row for the same cluster id.
        """
        return True


# Sorted by number, which is the order of candidates and of rewrites.
_strategies: list[MemoryStrategy] = []


def register_strategy(strategy: MemoryStrategy) -> None:
    """Add a strategy."""
    _strategies.append(strategy)
    _strategies.sort(key=lambda strategy: strategy.numbers)


def strategy_of(number: Strategy) -> MemoryStrategy:
    """Returns the strategy that implements a number of the plan grammar."""
    return next(strategy for strategy in _strategies if number in strategy.numbers)


def find_candidates(
    joint: JointGraph, activations: Sequence[SavedActivation], size_hints: SymbolValues, constants: Collection[fx.Node]
) -> tuple[Candidate, ...]:
    """Returns all candidates of a graph: those of the first strategy in graph order, then those of the next.

    Activations that save nothing have no candidate: row statistics, random draws, activations whose recompute saves as
    much in exchange in the first batch, results of the forward, since its caller holds them, small storages that do
    not grow with the batch, and constants, which no plan by name saves.
    """
    available = {activation.root for activation in activations}
    eligible = []
    for activation in activations:
        root, producer = activation.root, producing_operator(activation)
        if activation.is_returned or is_negligible(activation.bytes) or root in constants:
            continue
        # A chunked loss computes gradients in the forward; they live on as results of the backward.
        if is_statistic(root) or is_generator_state(root) or is_chunked_loss(producer.nodes[0]):
            continue
        chain = recompute_chain(joint, activation, available)
        eligible.append((activation, chain, _name(joint, chain, available) if chain else cluster_id(producer)))
    candidates = (strategy.candidate(*arguments, size_hints) for strategy in _strategies for arguments in eligible)
    return tuple(candidate for candidate in candidates if candidate is not None)


def _name(joint: JointGraph, chain: RecomputeChain, available: Collection[fx.Node]) -> str:
    """Returns the cluster id; for a mask that of its dropout, as in ONNX Runtime, where one node makes both."""
    output = dropout_of(chain.activation.root)
    activation = replace(chain.activation, root=output, reads=(output,)) if output else None
    return cluster_id((activation and recompute_chain(joint, activation, available)) or chain)


def rewrite(modules: Modules, candidates: Iterable[Candidate]) -> None:
    """Let each strategy rewrite forward and backward for its own candidates.

    Args:
        candidates: the candidates that are on.
    """
    candidates = tuple(candidates)
    for strategy in _strategies:
        strategy.rewrite(modules, tuple(c for c in candidates if c.strategy in strategy.numbers))


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
