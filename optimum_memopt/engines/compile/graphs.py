"""From a joint graph and a choice of plans to the two graphs that run, and what is known of them."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.engines.base import Selection
from optimum_memopt.logs import informing
from optimum_memopt.plans.grammar import Strategy

from . import barriers, compat, offload
from .joint import Joint, is_number, is_tensor, root, value
from .liveness import Handover, Prediction, handed_over, predict
from .offers import Offer, asked_for, find_offers, layer_borders, of_level
from .partition import kept, partition
from .rehearsal import Programs
from .selection import matches
from .stashes import Subgraph, find_stashes, operator_name

_DIMENSION = re.compile(r"\['(?P<input>\w+)'\]\.size\(\)\[(?P<dim>\d+)\]$")

# Which input an axis is named by when several share it, where not the first by name.
_RANK = {"input_ids": 0, "labels": 2}

Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, eq=False)
class Graph:
    """One compiled training graph.

    Attributes:
        offers: its rows.
        chosen: the occurrences that are made again or offloaded.
        free: occurrences that torch's own partition makes again without being asked; none where a plan is on.
        sizes: value of each symbol in the first batch.
        names: of the symbols, `input_ids_dim0`.
        prediction: for the first batch; None where it failed.
        predict: the same for other values of the symbols.
        handover: what the forward hands over to the backward.
        has_convolutions: whose kernels take workspaces that are no tensors of the graph.
        programs: what inductor makes of the two, once it has.
    """

    offers: tuple[Offer, ...]
    chosen: Mapping[Offer, tuple[Subgraph, ...]]
    free: frozenset[Subgraph]
    sizes: Mapping[sympy.Symbol, int]
    names: Mapping[sympy.Symbol, str]
    prediction: Prediction | None
    predict: Callable[[Mapping[sympy.Symbol, int]], Prediction]
    handover: Handover
    has_convolutions: bool = False
    programs: Programs = field(default_factory=Programs)


def split(
    module: fx.GraphModule,
    inputs: Any,
    num_fwd_outputs: int,
    others: dict[str, Any],
    selection: Selection,
    before: Iterable[Graph],
    is_only: bool = False,
) -> tuple[Graph, Modules]:
    """Partition a joint graph under a selection.

    Args:
        inputs, others: passed on to torch's own partitioner, which runs where nothing is selected.
        before: graphs of the same forward that were split before this one; a count runs on through all of them.
        is_only: no other graph of the forward can have what the config asks for and this one lacks.

    Raises:
        ConfigError: `is_only`, and the config asks for what the graph does not have.
    """
    module.graph.eliminate_dead_code()
    compat.remove_copies(module.graph, map(root, Joint(module, num_fwd_outputs).forward_outputs))
    joint = Joint(module, num_fwd_outputs)
    stashes = find_stashes(joint)
    sizes = first_sizes(joint)
    offers = find_offers(joint, stashes, sizes)
    chosen: Mapping[Offer, tuple[Subgraph, ...]] = {}
    if selection.level:
        chosen = of_level(offers, selection.level)
    elif selection.config is not None:
        if is_only:
            matches(selection.config, offers, selection.strict)
        taken = Counter({offer.config: len(made) for graph in before for offer, made in graph.chosen.items()})
        chosen = asked_for(offers, selection.config, taken)
    if selection.level or selection.config is not None:
        dropped, moved = chosen_roots(chosen)
        borders = layer_borders(joint) if selection.level else ()
        modules, free = partition(joint, kept(joint, stashes, dropped, borders)), frozenset()
        barriers.insert(*modules)
        if moved:
            offload.insert(*modules, {node.name for node in moved})
    else:
        modules = compat.default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        free = made_again(offers, modules[0], num_fwd_outputs)
    names, parameters, prediction, handover = {}, frozenset(), None, {}
    with informing("the predicted peak"):
        names = symbol_names(compat.symbol_sources())
        parameters = static_inputs(joint, others.get("static_lifetime_input_indices") or ())
        handover = handed_over(modules[0], num_fwd_outputs)
        prediction = predict(*modules, num_fwd_outputs, sizes, static_inputs=parameters)
    # Compilers change the modules that they are given.
    kept_modules = tuple(fx.GraphModule(one, copy.deepcopy(one.graph)) for one in modules) if sizes else modules

    def predict_for(others: Mapping[sympy.Symbol, int]) -> Prediction:
        return predict(*kept_modules, num_fwd_outputs, others, static_inputs=parameters)

    convolves = any(operator_name(node).startswith("convolution") for node in joint.forward)
    return Graph(offers, chosen, free, sizes, names, prediction, predict_for, handover, convolves), modules


def static_inputs(joint: Joint, indices: Iterable[int]) -> frozenset[str]:
    """Names of the inputs that stay where they are from step to step: parameters and buffers.

    Args:
        indices: as AOTAutograd counts inputs.
    """
    return frozenset(joint.inputs[index].name for index in indices)


def chosen_roots(chosen: Mapping[Offer, Sequence[Subgraph]]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The stashes that are made again, and those that are offloaded."""
    dropped, moved = set(), set()
    for offer, occurrences in chosen.items():
        roots = moved if offer.strategy is Strategy.OFFLOAD else dropped
        roots.update(made.stash.root for made in occurrences)
    return dropped, moved


def first_sizes(joint: Joint) -> dict[sympy.Symbol, int]:
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


def made_again(offers: Iterable[Offer], forward: fx.GraphModule, num_fwd_outputs: int) -> frozenset[Subgraph]:
    """The occurrences whose storage the forward does not hand over to the backward."""
    (output,) = forward.graph.find_nodes(op="output")
    saved = {root(node).name for node in output.args[0][num_fwd_outputs:] if isinstance(node, fx.Node)}
    return frozenset(made for offer in offers for made in offer.occurrences if made.stash.root.name not in saved)
