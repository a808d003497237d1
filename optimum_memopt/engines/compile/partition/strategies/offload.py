"""Strategy 3: saved activations wait for the backward in host memory.

torch has a pass for this (`torch._functorch._activation_offloading`), which came with 2.10 and silently skips views,
outputs of multi-output operators and non-contiguous tensors. Here the storage itself is copied, strides included.
"""

from collections.abc import Collection, Mapping, Sequence

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.candidates import Candidate
from optimum_memopt.engines.compile.graph.joint import ON_HOST, is_on_host, root, tensor_value, value
from optimum_memopt.engines.compile.graph.saved_activations import RecomputeChain, SavedActivation
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.events import Prediction, Timeline
from optimum_memopt.engines.compile.partition.passes import host_copies
from optimum_memopt.engines.compile.partition.strategies.registry import register_strategy
from optimum_memopt.plans.grammar import Strategy

# Names of nodes: of the copy in the forward, once it is complete, and of the one in the backward.
_ON_HOST, _RELOADED = "{}_on_host", "{}_reloaded"


class Offload:
    """See `MemoryStrategy`."""

    numbers: tuple[Strategy, ...] = (Strategy.OFFLOAD,)

    def candidate(
        self,
        activation: SavedActivation,
        chain: RecomputeChain | None,
        cluster_id: str,
        size_hints: Mapping[sympy.Symbol, int],
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

    def note_applied(self, candidates: Sequence[Candidate], prediction: Prediction, sizes: SymbolValues) -> str:
        """Whether the peak would be the same if all of them had stayed on the device."""
        bytes_of = compile_sizes(candidate.saving for candidate in candidates)(sizes)
        names = [candidate.activation.root.name for candidate in candidates]
        on_host, reloaded = (
            dict(zip(map(name.format, names), bytes_of, strict=True)) for name in (_ON_HOST, _RELOADED)
        )
        held = max(
            _most_if_kept(prediction.forward, on_host, is_forward=True),
            _most_if_kept(prediction.backward, reloaded, is_forward=False),
        )
        return "saves nothing at the peak" if held <= prediction.peak else ""

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """Only where there is nothing else."""
        return self.saves_on(device_type) and not is_recomputable


register_strategy(Offload())


def _most_if_kept(run: Timeline, copies: Mapping[str, int], is_forward: bool) -> int:
    """The most that a run would hold with what it offloads.

    Args:
        run: of the forward or the backward.
        copies: bytes that are away behind an operator (of the forward) or before it (of the backward), by its name.
        is_forward: which of the two it is.
    """
    kept = 0 if is_forward else sum(copies.values())
    most = 0
    for name, held in zip(run.nodes, run.held, strict=True):
        kept -= 0 if is_forward else copies.get(name, 0)
        most = max(most, held + kept)
        kept += copies.get(name, 0) if is_forward else 0
    return most


def insert(
    forward: fx.GraphModule, backward: fx.GraphModule, activations: Collection[str], is_on_accelerator: bool
) -> None:
    """Save host copies of activations instead of the activations.

    The graphs wait for each copy right where it begins; `passes.place_copies` moves them apart.

    Args:
        forward: offloads each activation after its last use.
        backward: reloads each copy before its first use.
        activations: names of roots that the forward saves and does not return.
        is_on_accelerator: the copies take none of the device's memory.
    """
    hosts = _offload(forward.graph, activations, is_on_accelerator)
    _reload(backward.graph, hosts)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _offload(graph: fx.Graph, activations: Collection[str], is_on_accelerator: bool) -> dict[str, fx.Node]:
    """The host copies by the name of their activation."""
    (output,) = graph.find_nodes(op="output")
    order = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last.update({root(read): node for read in (node, *node.all_input_nodes)})
    offloaded = sorted((node for node in last if node.name in activations), key=lambda node: order[last[node]])
    hosts = {}
    # Several may have the same last use; the first of them goes directly behind it.
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
