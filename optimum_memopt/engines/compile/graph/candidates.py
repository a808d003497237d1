"""Candidates: which saved activations a strategy can take out of memory, how each is recomputed, and what it saves.

Pure; a joint graph is read, not changed.
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
    """The operators that compute a saved activation from what is there anyway.

    Attributes:
        nodes: the operators to run again, in graph order; the last allocates the activation.
        reads: storages that are there anyway: inputs and other saved activations.
        extra_saved: nodes that have to be saved in exchange, since they must not run again.
    """

    activation: SavedActivation
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    extra_saved: tuple[fx.Node, ...]

    @property
    def saving(self) -> sympy.Expr:
        """Bytes of the activation less those saved in exchange."""
        return sympy.expand(self.activation.bytes - sum(self._exchanged))

    @property
    def is_compromise(self) -> bool:
        return bool(self._exchanged)

    @property
    def _exchanged(self) -> list[sympy.Expr]:
        """Bytes saved in exchange; what is negligible, a generator's state and copies of state are not counted."""
        counted = (node for node in self.extra_saved if not (is_generator_state(node) or is_state_copy(node)))
        sizes = (storage_bytes(root(node)) for node in counted)
        return [size for size in sizes if not is_negligible(size)]


def producing_operator(activation: SavedActivation) -> RecomputeChain:
    """The operator alone that computes an activation: what names one that cannot be recomputed."""
    operator = [first_input(activation.root)] if is_output(activation.root) else []
    return RecomputeChain(activation, (*operator, activation.root), (), ())


def recompute_chain(
    joint: JointGraph, activation: SavedActivation, available: Collection[fx.Node]
) -> RecomputeChain | None:
    """The way back from an activation to inputs and `available` roots; None where it must not be recomputed."""
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


def applied(
    candidates: Iterable[Candidate],
    saved: Collection[fx.Node],
    offloaded: Collection[fx.Node] = (),
    compressed: Collection[fx.Node] = (),
) -> tuple[Candidate, ...]:
    """The candidates that are on where the forward saves these nodes, some of them on the host or compressed."""
    kept = {Strategy.OFFLOAD: offloaded, Strategy.COMPRESS: compressed}

    def is_on(candidate: Candidate) -> bool:
        root = candidate.activation.root
        if candidate.strategy in kept:
            return root in kept[candidate.strategy]
        return candidate.chain is not None and root not in saved

    return tuple(filter(is_on, candidates))


def offloads(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates whose activation waits on the host."""
    return tuple(candidate for candidate in candidates if candidate.strategy is Strategy.OFFLOAD)


def compressions(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates whose activation is saved in fp8."""
    return tuple(candidate for candidate in candidates if candidate.strategy is Strategy.COMPRESS)


def roots_of(candidates: Iterable[Candidate]) -> frozenset[fx.Node]:
    """Returns the roots of the candidates' activations."""
    return frozenset(candidate.activation.root for candidate in candidates)


def by_row(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """The candidates of each row, rows in the order of their first candidate."""
    rows: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        rows.setdefault(candidate.row, []).append(candidate)
    return rows
