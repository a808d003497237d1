"""Candidates: saved activations that a strategy can take out of memory, with their recompute and savings.

Pure; joint graphs are not changed.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import sympy
from torch import fx

from optimum_memopt.engines.compile.graph.joint import (
    JointGraph,
    first_input,
    is_number,
    is_output,
    is_state_copy,
    is_tensor,
    root,
    storage_bytes,
    tensor_value,
)
from optimum_memopt.engines.compile.graph.saved_activations import (
    SavedActivation,
    is_generator_state,
    is_negligible,
    is_statistic,
)
from optimum_memopt.plans.grammar import ALL, Strategy


@dataclass(frozen=True, eq=False)
class RecomputeChain:
    """The operators that recompute a saved activation from storages that are held anyway.

    Attributes:
        nodes: the operators to run again, in graph order; the last allocates the activation.
        reads: storages that are held anyway: inputs and other saved activations.
        extra_saved: nodes that must be saved in exchange, since they must not run again.
    """

    activation: SavedActivation
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    extra_saved: tuple[fx.Node, ...]

    @property
    def saving(self) -> sympy.Expr:
        """Returns the bytes of the activation less those saved in exchange."""
        return sympy.expand(self.activation.bytes - sum(self._exchanged))

    @property
    def is_compromise(self) -> bool:
        return bool(self._exchanged)

    @property
    def _exchanged(self) -> list[sympy.Expr]:
        """Returns the sizes of storages saved in exchange, without negligible ones, generator states and copies of
        state."""
        counted = (node for node in self.extra_saved if not (is_generator_state(node) or is_state_copy(node)))
        sizes = (storage_bytes(root(node)) for node in counted)
        return [size for size in sizes if not is_negligible(size)]


def producing_operator(activation: SavedActivation) -> RecomputeChain:
    """Returns a chain of only the operator that computes an activation; it names activations without a recompute."""
    operator = [first_input(activation.root)] if is_output(activation.root) else []
    return RecomputeChain(activation, (*operator, activation.root), (), ())


def recompute_chain(
    joint: JointGraph, activation: SavedActivation, available: Collection[fx.Node]
) -> RecomputeChain | None:
    """Returns the chain from inputs and `available` roots to an activation; None if it must not be recomputed."""
    if joint.is_impure(activation.root) or is_statistic(activation.root):
        return None
    nodes = {activation.root}
    reads: dict[fx.Node, None] = {}
    extra_saved: dict[fx.Node, None] = {}
    todo = [activation.root]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in nodes or is_number(node):
                continue
            storage = root(node) if is_tensor(node) else node
            if storage is not activation.root and (storage.op == "placeholder" or storage in available):
                reads[storage] = None
                if node is storage:
                    continue
            elif joint.is_impure(node):
                extra_saved[node] = None
                continue
            nodes.add(node)
            todo.append(node)
    ordered = tuple(sorted(nodes, key=joint.order.__getitem__))
    return RecomputeChain(activation, ordered, tuple(reads), tuple(extra_saved))


@dataclass(frozen=True, eq=False)
class Candidate:
    """One saved activation under one strategy. A row of the plan table is all candidates with the same `row`.

    Attributes:
        activation: the activation, which does not wait for the backward on the device if the candidate is on.
        cluster_id: the id in the plan grammar: `Gelu+`.
        saving: bytes saved, in the symbols of the graph, less those saved in exchange.
        chain: the operators that recompute the activation; None for a strategy that saves it in another way.
        planned_for: the device type that the graph is planned for; empty: the type of its tensors' device.
    """

    activation: SavedActivation
    strategy: Strategy
    cluster_id: str
    saving: sympy.Expr
    chain: RecomputeChain | None = None
    planned_for: str = ""

    @property
    def row(self) -> str:
        """Returns the name of its row: `Gelu+:1:-1`."""
        return f"{self.cluster_id}:{int(self.strategy)}:{ALL}"

    @property
    def device_type(self) -> str:
        """Returns the device type of the activation: `cuda`."""
        return self.planned_for or tensor_value(self.activation.root).device.type


def applied(
    candidates: Iterable[Candidate],
    saved: Collection[fx.Node],
    offloaded: Collection[fx.Node] = (),
    compressed: Collection[fx.Node] = (),
) -> tuple[Candidate, ...]:
    """Returns the candidates that are on if the forward saves these nodes, some of them on the host or compressed."""
    kept = {Strategy.OFFLOAD: offloaded, Strategy.COMPRESS: compressed}

    def is_on(candidate: Candidate) -> bool:
        root = candidate.activation.root
        if candidate.strategy in kept:
            return root in kept[candidate.strategy]
        return candidate.chain is not None and root not in saved

    return tuple(filter(is_on, candidates))


def offloads(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates for offload."""
    return tuple(candidate for candidate in candidates if candidate.strategy is Strategy.OFFLOAD)


def compressions(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Returns the candidates for compression to fp8."""
    return tuple(candidate for candidate in candidates if candidate.strategy is Strategy.COMPRESS)


def roots_of(candidates: Iterable[Candidate]) -> frozenset[fx.Node]:
    """Returns the roots of the candidates' activations."""
    return frozenset(candidate.activation.root for candidate in candidates)


def by_row(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Returns the candidates of each row, rows in the order of their first candidate."""
    rows: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        rows.setdefault(candidate.row, []).append(candidate)
    return rows
