"""Strategy 3: stashes that wait for the backward in host memory.

torch has a pass for this (`torch._functorch._activation_offloading`), which came with 2.10 and passes over views,
outputs of multi-output operators and non-contiguous tensors in silence. Here the storage itself is copied, strides and
all. On CUDA the copies run on a stream of their own, from and to pinned memory, and come back ahead of use; elsewhere
they run where they stand in the graph.
"""

from collections.abc import Collection

import torch
from torch import fx

from .dropout import LIBRARY
from .joint import root, value

# How many offloaded stashes are under way on CUDA before the one that is needed next. Not tuned.
AHEAD = 2

_ON_HOST = f"{LIBRARY}_on_host"
_streams: dict[torch.device, torch.cuda.Stream] = {}
# When a copy back is complete, by where it goes.
_arrivals: dict[int, torch.cuda.Event] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for both directions: a copy back begins when the copy out has ended."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


@torch.library.custom_op(f"{LIBRARY}::to_host", mutates_args=())
def to_host(stash: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the same strides, pinned where `stash` is on CUDA."""
    host = torch.empty_strided(stash.shape, stash.stride(), dtype=stash.dtype, pin_memory=stash.is_cuda)
    if not stash.is_cuda:
        return host.copy_(stash)
    stream = _stream(stash.device)
    stream.wait_stream(torch.cuda.current_stream(stash.device))
    with torch.cuda.stream(stream):
        host.copy_(stash, non_blocking=True)
    stash.record_stream(stream)
    return host


@to_host.register_fake
def _(stash: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(stash.shape, stash.stride(), dtype=stash.dtype, device="cpu")


@torch.library.custom_op(f"{LIBRARY}::fetch", mutates_args=())
def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` with the same strides, to be read after `arrived`."""
    stash = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if not stash.is_cuda:
        return stash.copy_(host)
    stream = _stream(stash.device)
    # The memory may have been another tensor's, which the current stream still reads.
    stream.wait_stream(torch.cuda.current_stream(stash.device))
    with torch.cuda.stream(stream):
        stash.copy_(host, non_blocking=True)
        _arrivals[stash.data_ptr()] = stream.record_event()
    return stash


@fetch.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


# The result is the argument, which `custom_op` does not allow.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("arrived(Tensor(a) fetched) -> Tensor(a)")


@torch.library.impl(f"{LIBRARY}::arrived", "CompositeExplicitAutograd")
def _arrived(fetched: torch.Tensor) -> torch.Tensor:
    """`fetched`, which the current stream may read from now on."""
    event = _arrivals.pop(fetched.data_ptr(), None)
    if event is not None:
        torch.cuda.current_stream(fetched.device).wait_event(event)
    return fetched


@torch.library.register_fake(f"{LIBRARY}::arrived")
def _(fetched: torch.Tensor) -> torch.Tensor:
    return fetched


def is_on_host(node: fx.Node) -> bool:
    """Whether a root is a copy in the host's memory in a graph that runs elsewhere: it takes none of the device's."""
    return node.meta.get(_ON_HOST, False)


def insert(forward: fx.GraphModule, backward: fx.GraphModule, stashes: Collection[str], ahead: int = AHEAD) -> None:
    """Hand over host copies of stashes instead of the stashes.

    Args:
        forward: leaves each copy after the stash's last use.
        backward: fetches each copy before its first use.
        stashes: names of roots that the forward hands over.
        ahead: on CUDA a copy is under way to the device when the backward needs this many others first.
    """
    hosts = _leave(forward.graph, stashes)
    _fetch(backward.graph, hosts, ahead)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _leave(graph: fx.Graph, stashes: Collection[str]) -> dict[str, fx.Node]:
    """The host copies by the name of their stash."""
    (output,) = graph.find_nodes(op="output")
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            last.update({root(one): node for one in (node, *node.all_input_nodes)})
    hosts = {}
    for stash in [node for node in last if node.name in stashes]:
        with graph.inserting_after(last[stash]):
            host = graph.create_node(
                "call_function", torch.ops.optimum_memopt.to_host.default, (stash,), name=f"{stash.name}_on_host"
            )
        with value(stash).fake_mode:
            host.meta["val"] = to_host(value(stash))
        host.meta[_ON_HOST] = value(stash).device.type != "cpu"
        output.replace_input_with(stash, host)
        hosts[stash.name] = host
    return hosts


def _fetch(graph: fx.Graph, hosts: dict[str, fx.Node], ahead: int) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    stashes = [node for node in graph.find_nodes(op="placeholder") if node.name in hosts]
    first = {stash: min(stash.users, key=order.__getitem__) for stash in stashes}
    needed = sorted(stashes, key=lambda stash: order[first[stash]])
    begin = next(node for node in graph.nodes if node.op != "placeholder")
    for index, stash in enumerate(needed):
        host = hosts[stash.name]
        with graph.inserting_before(stash):
            waiting = graph.placeholder(host.name)
        waiting.meta.update(stash.meta, val=value(host), **{_ON_HOST: is_on_host(host)})
        early = ahead if is_on_host(host) else 0
        with graph.inserting_before(first[needed[index - early]] if index >= early else begin):
            fetched = graph.call_function(torch.ops.optimum_memopt.fetch.default, (waiting, value(stash).device))
        with graph.inserting_before(first[stash]):
            arrived = graph.call_function(torch.ops.optimum_memopt.arrived.default, (fetched,))
        for made in (fetched, arrived):
            made.meta.update(stash.meta)
        stash.replace_all_uses_with(arrived)
        graph.erase_node(stash)
