"""Strategy 3: saved activations wait for the backward in host memory.

torch has a pass for this (`torch._functorch._activation_offloading`), which came with 2.10 and silently skips views,
outputs of multi-output operators and non-contiguous tensors. Here the storage itself is copied, strides included.
"""

from collections.abc import Collection, Mapping

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.analysis.candidates import Candidate
from optimum_memopt.engines.compile.analysis.graph import Modules
from optimum_memopt.engines.compile.analysis.joint import ON_HOST, is_on_host, is_tensor, root, tensor_value, value
from optimum_memopt.engines.compile.analysis.recompute_chains import RecomputeChain
from optimum_memopt.engines.compile.analysis.saved_activations import SavedActivation
from optimum_memopt.engines.compile.passes import host_copies
from optimum_memopt.engines.compile.strategies.registry import register_strategy
from optimum_memopt.plans.grammar import Strategy

# How many copies are under way on CUDA beside the one that is needed next. Not tuned.
AHEAD = 2


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
            insert(*modules, {candidate.activation.root.name for candidate in candidates})

    def saves_on(self, device_type: str) -> bool:
        return device_type != "cpu"

    def note(self, device_type: str) -> str:
        if self.saves_on(device_type):
            return "offload"
        return "offload; saves nothing on the CPU, whose memory is the host's"

    def is_listed(self, device_type: str, is_recomputable: bool) -> bool:
        """Only where there is nothing else."""
        return self.saves_on(device_type) and not is_recomputable


register_strategy(Offload())


def insert(
    forward: fx.GraphModule, backward: fx.GraphModule, activations: Collection[str], ahead: int = AHEAD
) -> None:
    """Save host copies of activations instead of the activations.

    Args:
        forward: offloads each activation after its last use.
        backward: reloads each copy before its first use.
        activations: names of roots that the forward saves and does not return.
        ahead: how many later copies have begun on CUDA when a graph waits for one.
    """
    hosts = _offload(forward.graph, activations, ahead)
    _reload(backward.graph, hosts, ahead)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _copies_ahead(activation: fx.Node, ahead: int) -> int:
    return ahead if tensor_value(activation).is_cuda else 0


def _offload(graph: fx.Graph, activations: Collection[str], ahead: int) -> dict[str, fx.Node]:
    """The host copies by the name of their activation."""
    (output,) = graph.find_nodes(op="output")
    order = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last.update({root(read): node for read in (node, *node.all_input_nodes)})
    offloaded = sorted((node for node in last if node.name in activations), key=lambda node: order[last[node]])
    # Several may have the same last use; the first of them goes directly behind it.
    begun = [_begin_after(last[activation], activation) for activation in reversed(offloaded)][::-1]
    hosts = {}
    (result, *_) = output.args[0]
    for index, activation in enumerate(offloaded):
        later = index + _copies_ahead(activation, ahead)
        before = begun[later] if later < len(begun) else result
        with graph.inserting_before(begun[later].next if later < len(begun) else output):
            hosts[activation.name] = graph.create_node(
                "call_function",
                torch.ops.optimum_memopt.wait.default,
                (begun[index], activation, *([before] if later > index and _is_tensor_node(before) else [])),
                name=f"{activation.name}_on_host",
            )
        hosts[activation.name].meta.update(begun[index].meta)
        output.replace_input_with(activation, hosts[activation.name])
    return hosts


def _is_tensor_node(result: object) -> bool:
    return isinstance(result, fx.Node) and is_tensor(result)


def _begin_after(node: fx.Node, activation: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        begun = node.graph.call_function(torch.ops.optimum_memopt.offload.default, (activation,))
    with tensor_value(activation).fake_mode:
        begun.meta["val"] = host_copies.offload(tensor_value(activation))
    begun.meta[ON_HOST] = tensor_value(activation).device.type != "cpu"
    return begun


def _reload(graph: fx.Graph, hosts: dict[str, fx.Node], ahead: int) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    activations = [node for node in graph.find_nodes(op="placeholder") if node.name in hosts]
    first = {activation: min(activation.users, key=order.__getitem__) for activation in activations}
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    waits: list[fx.Node] = []
    for index, activation in enumerate(sorted(activations, key=lambda node: order[first[node]])):
        host = hosts[activation.name]
        with graph.inserting_before(activation):
            placeholder = graph.placeholder(host.name)
        placeholder.meta.update(activation.meta, val=value(host), **{ON_HOST: is_on_host(host)})
        early = _copies_ahead(activation, ahead)
        place = first[activation] if early == 0 else begin if index < early else waits[index - early]
        with graph.inserting_before(place):
            reloaded = graph.call_function(
                torch.ops.optimum_memopt.reload.default, (placeholder, tensor_value(activation).device)
            )
        with graph.inserting_before(first[activation]):
            waiting = graph.call_function(torch.ops.optimum_memopt.wait.default, (reloaded, placeholder))
        waits.append(waiting)
        if 0 < early <= index:
            earlier = waits[index - early]
            earlier.args = (*earlier.args, reloaded)
        for node in (reloaded, waiting):
            node.meta.update(activation.meta)
        activation.replace_all_uses_with(waiting)
        graph.erase_node(activation)
