"""The rows of the plan table: which stashes can be made again under which id, and which of them a user's choice means.

Pure; a joint graph is read, not changed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from torch import fx

from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_tensor, is_view, root, value
from optimum_memopt.engines.compile.analysis.naming import cluster_id, dropout_of, translate
from optimum_memopt.engines.compile.analysis.saved_activations import (
    RecomputeChain,
    SavedActivation,
    is_negligible,
    is_statistic,
    layer_of,
    producing_operator,
    recompute_chain,
)
from optimum_memopt.plans.grammar import ALL, PlanConfig, Strategy
from optimum_memopt.plans.matching import match


@dataclass(frozen=True, eq=False)
class Candidate:
    """One row: all stashes of a graph that the same operators make.

    Attributes:
        cluster_id: `Gelu+`.
        strategy: recompute, with compromise where something is kept in exchange, or offload.
        occurrences: in graph order.
    """

    cluster_id: str
    strategy: Strategy
    occurrences: tuple[RecomputeChain, ...]

    @property
    def saving(self) -> sympy.Expr:
        return sympy.Add(*(one.saving for one in self.occurrences))

    @property
    def is_on_cpu(self) -> bool:
        """Whether the stashes lie in the host's memory already."""
        return all(value(one.stash.root).device.type == "cpu" for one in self.occurrences)

    @property
    def config(self) -> str:
        return f"{self.cluster_id}:{int(self.strategy)}:{ALL}"


def find_candidates(
    joint: JointGraph, stashes: Sequence[SavedActivation], sizes: Mapping[sympy.Symbol, int]
) -> tuple[Candidate, ...]:
    """All rows of a graph, in the order of their first occurrence.

    What can be made again comes first. Every stash of a row can also be offloaded, under the same id, and so can those
    that must not be made again, but for row statistics.

    Left out is what saves nothing: row statistics, random draws, what costs as much as it saves, what the forward
    returns, since its caller holds it, and small storages that do not grow with the batch.

    Args:
        sizes: of the first batch, to tell whether a row saves anything.
    """
    available = {stash.root for stash in stashes}
    found: dict[tuple[str, Strategy], list[RecomputeChain]] = {}
    movable: dict[tuple[str, Strategy], list[RecomputeChain]] = {}
    for stash in stashes:
        if stash.is_returned or is_negligible(stash.bytes) or is_statistic(stash.root):
            continue
        made = recompute_chain(joint, stash, available)
        name = _name(joint, made, available) if made else cluster_id(producing_operator(stash))
        if made and made.saving.subs(sizes) > 0:
            strategy = Strategy.RECOMPUTE_WITH_COMPROMISE if made.is_compromise else Strategy.RECOMPUTE
            found.setdefault((name, strategy), []).append(made)
        movable.setdefault((name, Strategy.OFFLOAD), []).append(producing_operator(stash))
    return tuple(Candidate(name, strategy, tuple(made)) for (name, strategy), made in (found | movable).items())


def _name(joint: JointGraph, made: RecomputeChain, available: Collection[fx.Node]) -> str:
    """A mask has the id of the dropout that it belongs to, as ONNX Runtime's, where one node makes both; it is made
    again from its seed alone."""
    output = dropout_of(made.stash.root)
    stash = replace(made.stash, root=output, reads=(output,)) if output else None
    return cluster_id((stash and recompute_chain(joint, stash, available)) or made)


def select_by_config(
    candidates: Iterable[Candidate], config: PlanConfig, already: Mapping[str, int]
) -> dict[Candidate, tuple[RecomputeChain, ...]]:
    """The occurrences that a config turns on in one graph, the first `count` in graph order.

    Args:
        already: occurrences of each `cluster_id:strategy:-1` taken in graphs before this one.
    """
    candidates = tuple(candidates)
    found = match(
        config, [candidate.config for candidate in candidates], strict=False, here="engine", translate=translate
    )
    counts = {one.plan: one.request.count for one in found.on}
    chosen = {}
    for candidate in candidates:
        count = counts.get(candidate.config)
        if count is not None:
            left = len(candidate.occurrences) if count == ALL else max(0, count - already.get(candidate.config, 0))
            chosen[candidate] = candidate.occurrences[:left]
    return chosen


def select_by_level(candidates: Iterable[Candidate], level: int) -> dict[Candidate, tuple[RecomputeChain, ...]]:
    """Everything that can be made again inside each layer from what goes into the layer."""
    strategies = (Strategy.RECOMPUTE, Strategy.RECOMPUTE_WITH_COMPROMISE)[:level]
    return {
        candidate: tuple(made for made in candidate.occurrences if made.stash.layer and not made.stash.leaves_layer)
        for candidate in candidates
        if candidate.strategy in strategies
    }


def layer_boundaries(joint: JointGraph) -> frozenset[fx.Node]:
    """Storages made in one layer and read in another: what a layer must not be made again through.

    Without them a layer whose input nobody stashes (a norm that keeps its output only) would be made again from the
    layer before, and so on to the first, all alive at once.
    """
    borders = set()
    for node in joint.forward:
        if is_view(node):
            continue
        for read in node.all_input_nodes:
            made = root(read)
            if is_tensor(read) and made.op == "call_function" and layer_of(made) and layer_of(made) != layer_of(node):
                borders.add(made)
    return frozenset(borders)
