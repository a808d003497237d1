"""Strategy 3: stashes that wait for the backward in host memory.

torch has a pass for this (`torch._functorch._activation_offloading`), which came with 2.10 and passes over views,
outputs of multi-output operators and non-contiguous tensors in silence. Here the storage itself is copied, strides and
all. On CUDA the copies run on a stream of their own, from and to pinned memory, and come back ahead of use; elsewhere
they run where they stand in the graph.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx

from optimum_memopt.engines.compile.analysis.joint import root, value
from optimum_memopt.engines.compile.passes.dropout import LIBRARY

# How many offloaded stashes are under way on CUDA beside the one that is needed next. Not tuned.
AHEAD = 2

_ON_HOST = f"{LIBRARY}_on_host"
_streams: dict[torch.device, torch.cuda.Stream] = {}


class _Copy(NamedTuple):
    """One that is under way.

    Attributes:
        end: recorded behind it.
        held: its source and target, whose memory must not become another tensor's before, not even where an error
            ends the graph in between. `Tensor.record_stream` would hold it for copies that began later, too.
    """

    end: torch.cuda.Event
    held: tuple[torch.Tensor, torch.Tensor]


# By the address of the target.
_under_way: dict[int, _Copy] = {}


def _begin(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Copy beside what `device` computes, on one stream: a copy back begins when the copy out has ended.

    It waits for all that was asked of `device` so far: the source is made then, and whatever had the target's memory
    before is read.
    """
    for address in [address for address, copy in _under_way.items() if copy.end.query()]:
        del _under_way[address]
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        _under_way[target.data_ptr()] = _Copy(stream.record_event(), (source, target))


@torch.library.custom_op(f"{LIBRARY}::to_host", mutates_args=())
def to_host(stash: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the same strides, pinned where `stash` is on CUDA; complete after `arrived`."""
    host = torch.empty_strided(stash.shape, stash.stride(), dtype=stash.dtype, pin_memory=stash.is_cuda)
    if not stash.is_cuda:
        return host.copy_(stash)
    _begin(stash, host, stash.device)
    return host


@to_host.register_fake
def _(stash: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(stash.shape, stash.stride(), dtype=stash.dtype, device="cpu")


@torch.library.custom_op(f"{LIBRARY}::fetch", mutates_args=())
def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` with the same strides, complete after `arrived`."""
    stash = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if not stash.is_cuda:
        return stash.copy_(host)
    _begin(host, stash, stash.device)
    return stash


@fetch.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


# The result is the argument, which `custom_op` does not allow.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("arrived(Tensor(a) target, Tensor source) -> Tensor(a)")


@torch.library.impl(f"{LIBRARY}::arrived", "CompositeExplicitAutograd")
def _arrived(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target`, complete for all that is asked of the GPU from now on.

    Args:
        source: read here, so that inductor, which plans memory by reads, does not give it away during the copy.
    """
    copy = _under_way.pop(target.data_ptr(), None)
    if copy is not None:
        device = target.device if target.is_cuda else source.device
        torch.cuda.current_stream(device).wait_event(copy.end)
    return target


@torch.library.register_fake(f"{LIBRARY}::arrived")
def _(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return target


def is_on_host(node: fx.Node) -> bool:
    """Whether a root is a copy in the host's memory in a graph that runs elsewhere: it takes none of the device's."""
    return node.meta.get(_ON_HOST, False)


def insert(forward: fx.GraphModule, backward: fx.GraphModule, stashes: Collection[str], ahead: int = AHEAD) -> None:
    """Hand over host copies of stashes instead of the stashes.

    Args:
        forward: copies each stash after its last use.
        backward: fetches each copy before its first use.
        stashes: names of roots that the forward hands over and does not return.
        ahead: how many later copies have begun on CUDA when a graph waits for one.
    """
    hosts = _leave(forward.graph, stashes, ahead)
    _fetch(backward.graph, hosts, ahead)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _early(stash: fx.Node, ahead: int) -> int:
    return ahead if value(stash).is_cuda else 0


def _leave(graph: fx.Graph, stashes: Collection[str], ahead: int) -> dict[str, fx.Node]:
    """The host copies by the name of their stash."""
    (output,) = graph.find_nodes(op="output")
    order = {node: index for index, node in enumerate(graph.nodes)}
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last.update({root(one): node for one in (node, *node.all_input_nodes)})
    leaving = sorted((node for node in last if node.name in stashes), key=lambda stash: order[last[stash]])
    # Several may have the same last use; the first of them goes directly behind it.
    begun = [_begin_after(last[stash], stash) for stash in reversed(leaving)][::-1]
    hosts = {}
    for index, stash in enumerate(leaving):
        later = index + _early(stash, ahead)
        with graph.inserting_before(begun[later].next if later < len(begun) else output):
            hosts[stash.name] = graph.create_node(
                "call_function",
                torch.ops.optimum_memopt.arrived.default,
                (begun[index], stash),
                name=f"{stash.name}_on_host",
            )
        hosts[stash.name].meta.update(begun[index].meta)
        output.replace_input_with(stash, hosts[stash.name])
    return hosts


def _begin_after(node: fx.Node, stash: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        begun = node.graph.call_function(torch.ops.optimum_memopt.to_host.default, (stash,))
    with value(stash).fake_mode:
        begun.meta["val"] = to_host(value(stash))
    begun.meta[_ON_HOST] = value(stash).device.type != "cpu"
    return begun


def _fetch(graph: fx.Graph, hosts: dict[str, fx.Node], ahead: int) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    stashes = [node for node in graph.find_nodes(op="placeholder") if node.name in hosts]
    first = {stash: min(stash.users, key=order.__getitem__) for stash in stashes}
    needed = sorted(stashes, key=lambda stash: order[first[stash]])
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    arrivals: list[fx.Node] = []
    for index, stash in enumerate(needed):
        host = hosts[stash.name]
        with graph.inserting_before(stash):
            waiting = graph.placeholder(host.name)
        waiting.meta.update(stash.meta, val=value(host), **{_ON_HOST: is_on_host(host)})
        early = _early(stash, ahead)
        now = first[stash] if early == 0 else begin if index < early else arrivals[index - early]
        with graph.inserting_before(now):
            fetched = graph.call_function(torch.ops.optimum_memopt.fetch.default, (waiting, value(stash).device))
        with graph.inserting_before(first[stash]):
            arrived = graph.call_function(torch.ops.optimum_memopt.arrived.default, (fetched, waiting))
        arrivals.append(arrived)
        for made in (fetched, arrived):
            made.meta.update(stash.meta)
        stash.replace_all_uses_with(arrived)
        graph.erase_node(stash)
