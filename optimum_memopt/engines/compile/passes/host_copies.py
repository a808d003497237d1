"""Operators that copy a tensor to the host and back.

On CUDA the copies run on their own stream, from and to pinned memory, beside what the device computes; elsewhere they
run where they stand in the graph.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.operators import LIBRARY
from optimum_memopt.engines.compile.passes.pinned_pool import PinnedPool


class _Device(NamedTuple):
    """
    Attributes:
        stream: all copies from and to the device.
        pool: what is copied to on the host.
    """

    stream: torch.cuda.Stream
    pool: PinnedPool


_devices: dict[torch.device, _Device] = {}


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


def _of(device: torch.device) -> _Device:
    if device not in _devices:
        stream = torch.cuda.Stream(device)
        runtime = torch.cuda.cudart()

        def pin(address: int, size: int) -> None:
            with torch.cuda.device(device):
                torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))

        def unpin(address: int) -> None:
            torch.cuda.check_error(runtime.cudaHostUnregister(address))

        _devices[device] = _Device(stream, PinnedPool(pin, unpin, stream.synchronize))
    return _devices[device]


def release_pinned() -> None:
    """Give back the pinned memory that no offloaded activation has."""
    for device in _devices.values():
        device.stream.synchronize()
    _forget_ended()
    for device in _devices.values():
        device.pool.release()


def _forget_ended() -> None:
    for address in [address for address, copy in _under_way.items() if copy.end.query()]:
        del _under_way[address]


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 if tensor.numel() else 0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All memory from the first element to the last: torch copies what is not contiguous through pageable memory, and
    waits for it (`aten/src/ATen/native/cuda/Copy.cpp`, 2.13)."""
    return tensor.as_strided((_span(tensor),), (1,))


def _begin(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Copy beside what `device` computes, on one stream: a reload begins when the offload has ended.

    It waits for all that was asked of `device` so far: by then the source is computed, and whatever had the target's
    memory before has been read.
    """
    _forget_ended()
    stream = _of(device).stream
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _flat(target).copy_(_flat(source), non_blocking=True)
        _under_way[target.data_ptr()] = _Copy(stream.record_event(), (source, target))


@torch.library.custom_op(f"{LIBRARY}::offload", mutates_args=(), tags=compat.CUDAGRAPH_UNSAFE)
def offload(activation: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the same strides, pinned where `activation` is on CUDA; complete after `wait`."""
    if not activation.is_cuda:
        host = torch.empty_strided(activation.shape, activation.stride(), dtype=activation.dtype)
        _flat(host).copy_(_flat(activation))
        return host
    memory = _of(activation.device).pool.take(max(1, _span(activation)) * activation.itemsize)
    host = memory.view(activation.dtype).as_strided(activation.shape, activation.stride())
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
