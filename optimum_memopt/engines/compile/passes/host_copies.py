"""Operators that copy a tensor to the host and back.

On CUDA the copies run on their own stream, from and to pinned memory, beside what the device computes; elsewhere they
run where they stand in the graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.operators import LIBRARY

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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from the first element to the last, gaps included: torch copies what is not contiguous through
    pageable memory, and waits for it (`aten/src/ATen/native/cuda/Copy.cpp`, 2.13)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def _begin(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Copy beside what `device` computes, on one stream: a reload begins when the offload has ended.

    It waits for all that was asked of `device` so far: by then the source is computed, and whatever had the target's
    memory before has been read.
    """
    for address in [address for address, copy in _under_way.items() if copy.end.query()]:
        del _under_way[address]
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _flat(target).copy_(_flat(source), non_blocking=True)
        _under_way[target.data_ptr()] = _Copy(stream.record_event(), (source, target))


@torch.library.custom_op(f"{LIBRARY}::offload", mutates_args=(), tags=compat.CUDAGRAPH_UNSAFE)
def offload(activation: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the same strides, pinned where `activation` is on CUDA; complete after `wait`."""
    host = torch.empty_strided(
        activation.shape, activation.stride(), dtype=activation.dtype, pin_memory=activation.is_cuda
    )
    if not activation.is_cuda:
        _flat(host).copy_(_flat(activation))
        return host
    _begin(activation, host, activation.device)
    return host


@offload.register_fake
def _(activation: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(activation.shape, activation.stride(), dtype=activation.dtype, device="cpu")


@torch.library.custom_op(f"{LIBRARY}::reload", mutates_args=(), tags=compat.CUDAGRAPH_UNSAFE)
def reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` with the same strides, complete after `wait`."""
    activation = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if not activation.is_cuda:
        _flat(activation).copy_(_flat(host))
        return activation
    _begin(host, activation, activation.device)
    return activation


@reload.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


# The result is the argument, which `custom_op` does not allow.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("wait(Tensor(a) target, Tensor source, Tensor[] begun) -> Tensor(a)", tags=compat.CUDAGRAPH_UNSAFE)


@torch.library.impl(f"{LIBRARY}::wait", "CompositeExplicitAutograd")
def _wait(target: torch.Tensor, source: torch.Tensor, begun: Sequence[torch.Tensor]) -> torch.Tensor:
    """`target`, complete for all that is asked of the GPU from now on.

    Args:
        target: the copy.
        source: read here, so that inductor, which plans memory by reads, does not reuse it during the copy.
        begun: computed or being copied by now. inductor, which orders operators by what they read, would put the wait
            right behind its own copy (torch's `ao::wait_tensor` has the same argument for its memory, 2.13).
    """
    copy = _under_way.pop(target.data_ptr(), None)
    if copy is not None:
        device = target.device if target.is_cuda else source.device
        torch.cuda.current_stream(device).wait_event(copy.end)
    return target


@torch.library.register_fake(f"{LIBRARY}::wait")
def _(target: torch.Tensor, source: torch.Tensor, begun: Sequence[torch.Tensor]) -> torch.Tensor:
    return target
