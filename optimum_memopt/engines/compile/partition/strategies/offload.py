"""Strategy 3: saved activations wait for the backward in host memory.

torch has a pass for this (`torch._functorch._activation_offloading`), which came with 2.10 and silently skips views,
outputs of multi-output operators and non-contiguous tensors. Here the storage itself is copied, strides included.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate, RecomputeChain
from optimum_memopt.engines.compile.graph.joint import (
    ON_HOST,
    is_on_host,
    is_tensor,
    root,
    storage_bytes,
    tensor_value,
    value,
)
from optimum_memopt.engines.compile.graph.saved_activations import SavedActivation
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.graph_events import Prediction, RunMemory
from optimum_memopt.engines.compile.partition import host_copies
from optimum_memopt.engines.compile.partition.strategies import MemoryStrategy, register_strategy
from optimum_memopt.engines.compile.solver.offload import Copy, overlap
from optimum_memopt.plans.grammar import Strategy

# Names of nodes: the completed host copy in the forward, and the reloaded copy in the backward.
_ON_HOST, _RELOADED = "{}_on_host", "{}_reloaded"
# Returns the indices of the operators before which copies end, given the operators, the indices of those after which
# the copies begin, and the copied tensors.
_Ends = Callable[[Sequence[fx.Node], Sequence[int], Sequence[fx.Node]], tuple[int, ...]]


class Offload(MemoryStrategy):
    numbers = (Strategy.OFFLOAD,)

    def candidate(
        self, activation: SavedActivation, chain: RecomputeChain | None, cluster_id: str, size_hints: SymbolValues
    ) -> Candidate | None:
        return Candidate(activation, Strategy.OFFLOAD, cluster_id, activation.bytes)

    def rewrite(self, modules: Modules, candidates: tuple[Candidate, ...]) -> None:
        if candidates:
            activations = {candidate.activation.root.name for candidate in candidates}
            insert(*modules, activations, any(self.saves_on(candidate.device_type) for candidate in candidates))

    def saves_on(self, device_type: str) -> bool:
        return device_type != "cpu"

    def note(self, device_type: str) -> str:
        if self.saves_on(device_type):
            return "offload"
        return "offload; saves nothing on the CPU, whose memory is the host's"

    def note_applied(self, candidates: Sequence[Candidate], prediction: Prediction[str], sizes: SymbolValues) -> str:
        """Returns a note if the peak would be the same with all candidates kept on the device."""
        bytes_of = compile_sizes(candidate.saving for candidate in candidates)(sizes)
        sizes_by_name = dict(zip((candidate.activation.root.name for candidate in candidates), bytes_of, strict=True))
        held = max(
            _most_if_kept(prediction.forward, sizes_by_name, _ON_HOST, is_forward=True),
            _most_if_kept(prediction.backward, sizes_by_name, _RELOADED, is_forward=False),
        )
        return "saves nothing at the peak" if held <= prediction.peak else ""

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """True if the device saves memory by offload and recompute is no alternative."""
        return self.saves_on(device_type) and not is_recomputable


register_strategy(Offload())


def _most_if_kept(run: RunMemory[str], sizes: Mapping[str, int], copy_name: str, is_forward: bool) -> int:
    """Returns the peak bytes of a run if the activations also stayed on the device while they are on the host: after
    their copies in the forward, before them in the backward."""
    copies = {copy_name.format(name): size for name, size in sizes.items()}
    kept = 0 if is_forward else sum(copies.values())
    most = 0
    for name, held in zip(run.order, run.held, strict=True):
        size = copies.get(name, 0)
        kept -= 0 if is_forward else size
        most = max(most, held + kept)
        kept += size if is_forward else 0
    return most


def insert(
    forward: fx.GraphModule, backward: fx.GraphModule, activations: Collection[str], is_on_accelerator: bool
) -> None:
    """Save host copies of activations instead of the activations; each copy is waited for right after it begins.

    Args:
        activations: names of roots that the forward saves and does not return.
        is_on_accelerator: the graph runs on an accelerator, so that host copies take none of its memory.
    """
    _reload(backward.graph, _offload(forward.graph, activations, is_on_accelerator))
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns the last operator that reads each storage, by root; the root itself if nothing reads the storage."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last.update({root(read): node for read in (node, *node.all_input_nodes)})
    return last


def _offload(graph: fx.Graph, activations: Collection[str], is_on_accelerator: bool) -> dict[str, fx.Node]:
    """Adds the host copies; returns them by the name of their activation."""
    (output,) = graph.find_nodes(op="output")
    order, last = {node: index for index, node in enumerate(graph.nodes)}, last_uses(graph)
    offloaded = sorted((node for node in last if node.name in activations), key=lambda node: order[last[node]])
    hosts = {}
    # If several activations have the same last use, the first one's copy comes right after it.
    for activation in reversed(offloaded):
        with graph.inserting_after(last[activation]):
            begun = graph.call_function(torch.ops.optimum_memopt.offload.default, (activation,))
        with graph.inserting_after(begun):
            host = graph.create_node(
                "call_function",
                torch.ops.optimum_memopt.wait.default,
                (begun, activation, []),
                name=_ON_HOST.format(activation.name),
            )
        with tensor_value(activation).fake_mode:
            begun.meta["val"] = host_copies.offload(tensor_value(activation))
        begun.meta[ON_HOST] = is_on_accelerator
        host.meta.update(begun.meta)
        output.replace_input_with(activation, host)
        hosts[activation.name] = host
    return hosts


def _reload(graph: fx.Graph, hosts: Mapping[str, fx.Node]) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    for activation in [node for node in graph.find_nodes(op="placeholder") if node.name in hosts]:
        host = hosts[activation.name]
        first = min(activation.users, key=order.__getitem__)
        with graph.inserting_before(activation):
            placeholder = graph.placeholder(host.name)
        placeholder.meta.update(activation.meta, val=value(host), **{ON_HOST: is_on_host(host)})
        with graph.inserting_before(first):
            reloaded = graph.create_node(
                "call_function",
                torch.ops.optimum_memopt.reload.default,
                (placeholder, tensor_value(activation).device),
                name=_RELOADED.format(activation.name),
            )
            waiting = graph.call_function(torch.ops.optimum_memopt.wait.default, (reloaded, placeholder, []))
        for node in (reloaded, waiting):
            node.meta.update(activation.meta)
        activation.replace_all_uses_with(waiting)
        graph.erase_node(activation)


def place_copies(
    modules: Modules, prediction: Prediction[str], seconds: Mapping[str, float], sizes: SymbolValues, bandwidth: float
) -> None:
    """Move the beginnings of copies and their waits apart, so that the GPU computes in between.

    In the forward each wait is moved later, in the backward each reload earlier, by the estimated time of the copy,
    and never so far that copies in progress raise the graphs' peak. torch's own offload
    (`torch/_functorch/_activation_offloading`, 2.13) moves them by a number of operators instead.

    Args:
        modules: forward and backward, which wait for each copy right after it begins.
        seconds: seconds of operators, by the names of their nodes; others take none.
        bandwidth: bytes a second of the link to the host, in one direction.
    """

    def ends(
        held: Sequence[int], nodes: Sequence[fx.Node], begins: Sequence[int], copied: Sequence[fx.Node]
    ) -> tuple[int, ...]:
        """Returns the indices of the operators before which the copies end; see `_Ends`."""
        sizes_of = compile_sizes([storage_bytes(tensor) for tensor in copied])(sizes)
        copies = [Copy(begin, size) for begin, size in zip(begins, sizes_of, strict=True)]
        times = [seconds.get(node.name, 0.0) for node in nodes]
        return overlap(held, times, copies, prediction.peak, bandwidth).until

    forward, backward = modules
    _place_waits(forward.graph, partial(ends, prediction.forward.held))
    # In reverse order.
    _place_reloads(backward.graph, partial(ends, prediction.backward.held[::-1]))
    for module in modules:
        module.graph.lint()
        module.recompile()


def _place_waits(graph: fx.Graph, ends: _Ends) -> None:
    nodes, waits = _operators(graph), _waits(graph)
    at = {node: index for index, node in enumerate(nodes)}
    (output,) = graph.find_nodes(op="output")
    copied = [root(wait.all_input_nodes[1]) for wait in waits]
    for wait, end in zip(waits, ends(nodes, [at[wait] for wait in waits], copied), strict=True):
        computed = (node for node in reversed(nodes[at[wait] + 1 : end]) if is_tensor(node) and not _is_wait(node))
        if (before := next(computed, None)) is None:
            continue
        _anchor(nodes, end, waits, output).prepend(wait)
        # Otherwise inductor, which orders by reads, would put the wait right after its copy again.
        wait.args = (*wait.args[:2], [before])


def _place_reloads(graph: fx.Graph, ends: _Ends) -> None:
    nodes, waits = _operators(graph), _waits(graph)
    at = {node: index for index, node in enumerate(nodes)}
    reloads, count = [wait.all_input_nodes[0] for wait in waits], len(nodes)
    begins = [count - 1 - at[reload] for reload in reversed(reloads)]
    begun: dict[fx.Node, list[fx.Node]] = {}
    for reload, end in zip(reloads, reversed(ends(nodes[::-1], begins, reloads[::-1])), strict=True):
        place = count - end
        if place >= at[reload]:
            continue
        _anchor(nodes, place, reloads, reload).prepend(reload)
        # inductor may begin the reload later, but not after a wait that reads it.
        behind = next((wait for wait in waits if place <= at[wait] < at[reload]), None)
        if behind is not None:
            begun.setdefault(behind, []).append(reload)
    for wait, earlier in begun.items():
        wait.args = (*wait.args[:2], earlier)


def _operators(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _waits(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _is_wait(node)]


def _is_wait(node: fx.Node) -> bool:
    return node.target is torch.ops.optimum_memopt.wait.default


def _anchor(nodes: Sequence[fx.Node], index: int, moving: Collection[fx.Node], end: fx.Node) -> fx.Node:
    return next((node for node in nodes[index:] if node not in moving), end)
