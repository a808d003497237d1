"""From a joint graph and a choice of plans to the two graphs that run, and what is known of them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.analysis.candidates import (
    Candidate,
    find_candidates,
    layer_boundaries,
    select_by_config,
    select_by_level,
)
from optimum_memopt.engines.compile.analysis.joint import JointGraph, is_number, is_tensor, root, value
from optimum_memopt.engines.compile.analysis.saved_activations import (
    RecomputeChain,
    find_saved_activations,
    operator_name,
)
from optimum_memopt.engines.compile.memory.inductor_memory import InductorPrograms
from optimum_memopt.engines.compile.memory.timeline import GraphTimeline, Prediction, graph_timeline
from optimum_memopt.engines.compile.passes import barriers
from optimum_memopt.engines.compile.passes.partition import kept, partition
from optimum_memopt.engines.compile.selection import matches
from optimum_memopt.engines.compile.strategies import offload
from optimum_memopt.logs import informing
from optimum_memopt.plans.grammar import Strategy

_DIMENSION = re.compile(r"\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]$")

# Which input an axis is named by when several share it, where not the first by name.
_RANK = {"input_ids": 0, "labels": 2}

Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """One compiled training graph.

    Attributes:
        candidates: its rows.
        chosen: the occurrences that are made again or offloaded.
        auto_recomputed: occurrences that torch's own partition makes again by itself; none where a plan is on.
        sizes: value of each symbol in the first batch.
        names: of the symbols, `input_ids_dim0`.
        timeline: what its forward and backward hold, for any values of the symbols; None where it cannot be known.
        prediction: of the first batch.
        has_convolutions: whose kernels take workspaces that are no tensors of the graph.
        programs: what inductor makes of the two, once it has.
        is_all_of_forward: nothing of the model's forward runs outside of the graph.
    """

    candidates: tuple[Candidate, ...]
    chosen: Mapping[Candidate, tuple[RecomputeChain, ...]]
    auto_recomputed: frozenset[RecomputeChain]
    sizes: Mapping[sympy.Symbol, int]
    names: Mapping[sympy.Symbol, str]
    timeline: GraphTimeline | None
    prediction: Prediction | None
    has_convolutions: bool = False
    programs: InductorPrograms = field(default_factory=InductorPrograms)
    is_all_of_forward: bool = True


def split(
    module: fx.GraphModule,
    inputs: Any,
    num_fwd_outputs: int,
    others: dict[str, Any],
    selection: Selection,
    before: Iterable[PartitionedGraph],
    is_only: bool = False,
) -> tuple[PartitionedGraph, Modules]:
    """Partition a joint graph under a selection.

    Args:
        inputs, others: passed on to torch's own partitioner, which runs where nothing is selected.
        before: graphs of the same forward that were split before this one; a count runs on through all of them.
        is_only: no other graph of the forward can have what the config asks for and this one lacks.

    Raises:
        ConfigError: `is_only`, and the config asks for what the graph does not have.
    """
    module.graph.eliminate_dead_code()
    compat.remove_copies(module.graph, map(root, JointGraph(module, num_fwd_outputs).forward_outputs))
    joint = JointGraph(module, num_fwd_outputs)
    stashes = find_saved_activations(joint)
    sizes = size_hints(joint)
    candidates = find_candidates(joint, stashes, sizes)
    chosen: Mapping[Candidate, tuple[RecomputeChain, ...]] = {}
    if selection.level:
        chosen = select_by_level(candidates, selection.level)
    elif selection.config is not None:
        if is_only:
            matches(selection.config, candidates, selection.strict)
        taken = Counter({candidate.config: len(made) for graph in before for candidate, made in graph.chosen.items()})
        chosen = select_by_config(candidates, selection.config, taken)
    if selection.level or selection.config is not None:
        dropped, moved = chosen_roots(chosen)
        borders = layer_boundaries(joint) if selection.level else ()
        modules, auto_recomputed = partition(joint, kept(joint, stashes, dropped, borders)), frozenset()
        barriers.insert(*modules)
        if moved:
            offload.insert(*modules, {node.name for node in moved})
    else:
        modules = compat.default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        auto_recomputed = recomputed_by_torch(candidates, modules[0], num_fwd_outputs)
    names, timeline, prediction = {}, None, None
    with informing("the predicted peak"):
        names = symbol_names(compat.symbol_sources())
        parameters = static_inputs(joint, others.get("static_lifetime_input_indices") or ())
        timeline = graph_timeline(*modules, num_fwd_outputs, static_inputs=parameters)
        prediction = timeline.predict(sizes)
    convolves = any(operator_name(node).startswith("convolution") for node in joint.forward)
    return PartitionedGraph(
        candidates, chosen, auto_recomputed, sizes, names, timeline, prediction, convolves
    ), modules


def static_inputs(joint: JointGraph, indices: Iterable[int]) -> frozenset[str]:
    """Names of the inputs that stay where they are from step to step: parameters and buffers.

    Args:
        indices: as AOTAutograd counts inputs.
    """
    return frozenset(joint.inputs[index].name for index in indices)


def chosen_roots(chosen: Mapping[Candidate, Sequence[RecomputeChain]]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The stashes that are made again, and those that are offloaded."""
    dropped, moved = set(), set()
    for candidate, occurrences in chosen.items():
        roots = moved if candidate.strategy is Strategy.OFFLOAD else dropped
        roots.update(made.stash.root for made in occurrences)
    return dropped, moved


def size_hints(joint: JointGraph) -> dict[sympy.Symbol, int]:
    """Each symbol's value in the batch that the graph was traced with."""
    numbers = [value(node) for node in joint.inputs if is_number(node)]
    shapes = [size for node in joint.inputs if is_tensor(node) for size in value(node).shape]
    found = {}
    for number in (*numbers, *shapes):
        if isinstance(number, torch.SymInt) and number.node.expr.is_Symbol:
            found[number.node.expr] = int(number.node.hint)
    return found


def symbol_names(sources: Mapping[sympy.Symbol, Sequence[str]]) -> dict[sympy.Symbol, str]:
    """`input_ids_dim0` of `L['kwargs']['input_ids'].size()[0]`; symbols that are no size of an input have no name."""
    names = {}
    for symbol, found in sources.items():
        matches = [match for source in found if (match := _DIMENSION.search(source))]
        if matches:
            first = min(matches, key=lambda match: (_RANK.get(match["input"], 1), match["input"]))
            names[symbol] = f"{first['input']}_dim{first['dim']}"
    return names


def recomputed_by_torch(
    candidates: Iterable[Candidate], forward: fx.GraphModule, num_fwd_outputs: int
) -> frozenset[RecomputeChain]:
    """The occurrences whose storage the forward does not hand over to the backward."""
    (output,) = forward.graph.find_nodes(op="output")
    saved = {root(node).name for node in output.args[0][num_fwd_outputs:] if isinstance(node, fx.Node)}
    return frozenset(
        made for candidate in candidates for made in candidate.occurrences if made.stash.root.name not in saved
    )
