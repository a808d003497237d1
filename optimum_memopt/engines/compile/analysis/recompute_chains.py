"""What it takes to recompute a saved activation. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

import sympy
from torch import fx

from optimum_memopt.engines.compile.analysis.joint import (
    JointGraph,
    first_input,
    is_number,
    is_tensor,
    root,
    storage_bytes,
)
from optimum_memopt.engines.compile.analysis.saved_activations import (
    SavedActivation,
    is_generator_state,
    is_negligible,
    is_output,
    is_statistic,
)


@dataclass(frozen=True, eq=False)
class RecomputeChain:
    """The operators that compute a saved activation from what is there anyway.

    Attributes:
        activation: the one to recompute.
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
        """Bytes of the activation less those saved in exchange; neither what is negligible nor a generator's state is
        counted."""
        return sympy.expand(self.activation.bytes - sum(self._exchanged))

    @property
    def is_compromise(self) -> bool:
        """Whether more than something negligible is saved in exchange."""
        return bool(self._exchanged)

    @property
    def _exchanged(self) -> list[sympy.Expr]:
        sizes = (storage_bytes(root(node)) for node in self.extra_saved if not is_generator_state(node))
        return [size for size in sizes if not is_negligible(size)]


def producing_operator(activation: SavedActivation) -> RecomputeChain:
    """The operator alone that computes an activation: what names one that cannot be recomputed."""
    operator = [first_input(activation.root)] if is_output(activation.root) else []
    return RecomputeChain(activation, (*operator, activation.root), (), ())


def recompute_chain(
    joint: JointGraph, activation: SavedActivation, available: Collection[fx.Node]
) -> RecomputeChain | None:
    """The way back from an activation to inputs and `available` storages; None where it must not be recomputed.

    Args:
        joint: read, not changed.
        activation: the one to recompute.
        available: roots of the activations that stay saved.
    """
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
