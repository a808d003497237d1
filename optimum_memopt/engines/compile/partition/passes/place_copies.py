"""Moves copies to the host, and the waits for them, apart, so that a GPU computes meanwhile.

A wait goes back in the forward, and a reload forward in the backward, by as much as the copy is estimated to take, and
never so far that what is under way takes the graphs beyond the peak that they have anyway. torch's own offload
(`torch/_functorch/_activation_offloading`, 2.13) moves by a number of operators instead.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.joint import is_tensor, root, storage_bytes
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.events import Prediction
from optimum_memopt.engines.compile.solver.offload import Copy, overlap


def place_copies(
    modules: Modules,
    prediction: Prediction,
    seconds: Mapping[str, float],
    sizes: SymbolValues,
    bandwidth: float,
) -> None:
    """Change both graphs in place.

    Args:
        modules: forward and backward, which wait for each copy right behind its beginning.
        prediction: of these.
        seconds: of operators, by the names of their nodes; others take none.
        sizes: value of each symbol.
        bandwidth: of the link to the host, bytes a second in one direction.
    """
    forward, backward = modules
    _place_waits(forward.graph, prediction, seconds, sizes, bandwidth)
    _place_reloads(backward.graph, prediction, seconds, sizes, bandwidth)
    for module in modules:
        module.graph.lint()
        module.recompile()


def _place_waits(
    graph: fx.Graph, prediction: Prediction, seconds: Mapping[str, float], sizes: SymbolValues, bandwidth: float
) -> None:
    nodes = _operators(graph)
    waits = _waits(graph)
    at = {node: index for index, node in enumerate(nodes)}
    of = _bytes([root(wait.all_input_nodes[1]) for wait in waits], sizes)
    copies = [Copy(at[wait], size) for wait, size in zip(waits, of, strict=True)]
    found = overlap(
        prediction.forward.held, [seconds.get(node.name, 0.0) for node in nodes], copies, prediction.peak, bandwidth
    )
    (output,) = graph.find_nodes(op="output")
    for wait, until in zip(waits, found.until, strict=True):
        before = _last_computed(nodes[at[wait] + 1 : until])
        if before is None:
            continue
        _anchor(nodes, until, waits, output).prepend(wait)
        # Else inductor, which orders by reads, puts the wait right behind its copy again.
        wait.args = (*wait.args[:2], [before])


def _place_reloads(
    graph: fx.Graph, prediction: Prediction, seconds: Mapping[str, float], sizes: SymbolValues, bandwidth: float
) -> None:
    nodes = _operators(graph)
    waits = _waits(graph)
    at = {node: index for index, node in enumerate(nodes)}
    reloads = {wait: wait.all_input_nodes[0] for wait in waits}
    of = dict(zip(waits, _bytes(list(reloads.values()), sizes), strict=True))
    count = len(nodes)
    # With time running backwards.
    copies = [Copy(count - 1 - at[reloads[wait]], of[wait]) for wait in reversed(waits)]
    found = overlap(
        prediction.backward.held[::-1],
        [seconds.get(node.name, 0.0) for node in reversed(nodes)],
        copies,
        prediction.peak,
        bandwidth,
    )
    begun: dict[fx.Node, list[fx.Node]] = {}
    for wait, until in zip(waits, reversed(found.until), strict=True):
        reload, place = reloads[wait], count - until
        if place >= at[reload]:
            continue
        _anchor(nodes, place, list(reloads.values()), reload).prepend(reload)
        # inductor might begin it later, but not behind a wait that reads it.
        behind = next((other for other in waits if place <= at[other] < at[reload]), None)
        if behind is not None:
            begun.setdefault(behind, []).append(reload)
    for wait, earlier in begun.items():
        wait.args = (*wait.args[:2], earlier)


def _operators(graph: fx.Graph) -> list[fx.Node]:
    """As `memory.events` counts them."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _waits(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _is_wait(node)]


def _bytes(roots: Sequence[fx.Node], sizes: SymbolValues) -> list[int]:
    return compile_sizes([storage_bytes(node) for node in roots])(sizes)


def _last_computed(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The last tensor among these that is computed, or copied to the host; None where nothing is."""
    return next((node for node in reversed(nodes) if is_tensor(node) and not _is_wait(node)), None)


def _is_wait(node: fx.Node) -> bool:
    return node.target is torch.ops.optimum_memopt.wait.default


def _anchor(nodes: Sequence[fx.Node], index: int, moving: Collection[fx.Node], end: fx.Node) -> fx.Node:
    """The first node from an index on that stays where it is."""
    return next((node for node in nodes[index:] if node not in moving), end)
