"""Candidates: which saved activations a strategy can take out of memory, and what each saves.

Pure; a joint graph is read, not changed.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import sympy
from torch import fx

from optimum_memopt.engines.compile.graph.joint import JointGraph, is_chunked_loss, tensor_value
from optimum_memopt.engines.compile.graph.naming import cluster_id, dropout_of
from optimum_memopt.engines.compile.graph.saved_activations import (
    RecomputeChain,
    SavedActivation,
    is_generator_state,
    is_negligible,
    is_statistic,
    producing_operator,
    recompute_chain,
)
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.plans.grammar import ALL, Strategy


@dataclass(frozen=True, eq=False)
class Candidate:
    """One saved activation under one strategy. A row of the plan table is all candidates with the same `row`.

    Attributes:
        activation: what does not have to wait for the backward on the device.
        cluster_id: `Gelu+`.
        saving: bytes in the symbols of the graph, less those saved in exchange.
        chain: what recomputes the activation, None under a strategy that saves it in another way.
        planned_for: type of the device that the graph is planned for, where its tensors only stand for that one's.
    """

    activation: SavedActivation
    strategy: Strategy
    cluster_id: str
    saving: sympy.Expr
    chain: RecomputeChain | None = None
    planned_for: str = ""

    @property
    def row(self) -> str:
        """`Gelu+:1:-1`, which names its row."""
        return f"{self.cluster_id}:{int(self.strategy)}:{ALL}"

    @property
    def device_type(self) -> str:
        """Where the activation lies: `cuda`."""
        return self.planned_for or tensor_value(self.activation.root).device.type


class FindsCandidate(Protocol):
    """A strategy as the analysis uses it; the strategies themselves are in `strategies/`."""

    def candidate(
        self, activation: SavedActivation, chain: RecomputeChain | None, cluster_id: str, size_hints: SymbolValues
    ) -> Candidate | None:
        """The activation's candidate, None where it saves nothing; without a chain it must not be recomputed."""


def find_candidates(
    joint: JointGraph,
    activations: Sequence[SavedActivation],
    size_hints: SymbolValues,
    strategies: Iterable[FindsCandidate],
    constants: Collection[fx.Node] = (),
) -> tuple[Candidate, ...]:
    """All candidates of a graph: those of the first strategy in graph order, then those of the next.

    Left out is what saves nothing: row statistics, random draws, what costs as much as it saves in the first batch,
    what the forward returns, since its caller holds it, small storages that do not grow with the batch, and constants,
    which no plan by name saves.
    """
    available = {activation.root for activation in activations}
    eligible = []
    for activation in activations:
        root, producer = activation.root, producing_operator(activation)
        if activation.is_returned or is_negligible(activation.bytes) or root in constants:
            continue
        # A loss that is chunked computes gradients early: each lives on as the backward's result.
        if is_statistic(root) or is_generator_state(root) or is_chunked_loss(producer.nodes[0]):
            continue
        chain = recompute_chain(joint, activation, available)
        name = _name(joint, chain, available) if chain else cluster_id(producer)
        eligible.append((activation, chain, name))
    candidates = (strategy.candidate(*arguments, size_hints) for strategy in strategies for arguments in eligible)
    return tuple(candidate for candidate in candidates if candidate is not None)


def recomputed(candidates: Iterable[Candidate], saved: Collection[fx.Node]) -> tuple[Candidate, ...]:
    """Candidates of recompute whose activation is not among the nodes that are saved."""
    return tuple(c for c in candidates if c.chain is not None and c.activation.root not in saved)


def offloads(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates whose activation waits on the host."""
    return tuple(candidate for candidate in candidates if candidate.strategy is Strategy.OFFLOAD)


def by_row(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """The candidates of each row, rows in the order of their first candidate."""
    rows: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        rows.setdefault(candidate.row, []).append(candidate)
    return rows


def _name(joint: JointGraph, chain: RecomputeChain, available: Collection[fx.Node]) -> str:
    """The cluster id; of a mask that of its dropout, as in ONNX Runtime, where one node makes both."""
    output = dropout_of(chain.activation.root)
    activation = replace(chain.activation, root=output, reads=(output,)) if output else None
    return cluster_id((activation and recompute_chain(joint, activation, available)) or chain)
