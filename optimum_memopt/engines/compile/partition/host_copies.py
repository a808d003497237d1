"""Pinned host memory for offloaded activations.

torch's pinned allocator rounds each tensor up to a power of two: 64 MiB for one of 48
(`aten/src/ATen/core/CachingHostAllocator.h`, 2.13). Here a tensor is rounded up to whole pages only.
"""

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from optimum_memopt.engines.simulator.allocator import pinned_bytes
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY


@dataclass(eq=False)
class _Block:
    # A shared mapping: after a fork, a private page is copied on write, and the device would keep using the old page.
    memory: mmap.mmap
    address: int
    # torch keeps it alive as long as any tensor uses this memory, views and autograd's saved tensors included.
    reader: "weakref.ref[memoryview] | None" = None

    @property
    def is_free(self) -> bool:
        return self.reader is None or self.reader() is None


class PinnedPool:
    """A pool of pinned memory for the copies of one stream of a device.

    A block is reused as soon as the last tensor in its memory is gone, even if a copy from it is still in progress:
    the next copy into it is issued on the same stream, which keeps their order. The host itself never writes to it.

    Args:
        pin: pins memory, given its address and size.
        unpin: unpins memory, given its address.
        finish: waits until all copies of the stream have ended.
    """

    def __init__(
        self, pin: Callable[[int, int], None], unpin: Callable[[int], None], finish: Callable[[], None]
    ) -> None:
        self._pin, self._unpin, self._finish = pin, unpin, finish
        self._blocks: list[_Block] = []
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Returns the bytes that are pinned now, free blocks included."""
        return sum(len(block.memory) for block in self._blocks)

    def take(self, size: int) -> torch.Tensor:
        """Returns an uninitialized tensor of bytes.

        It takes the first free block, which is replaced if it is too small: a step requests its tensors in the order
        of its graph, so each block grows to the largest size of its tensor. Best fit would give a larger tensor's
        block to a smaller one whenever batches grow.
        """
        with self._lock:
            index = next((index for index, block in enumerate(self._blocks) if block.is_free), len(self._blocks))
            block = self._blocks[index] if index < len(self._blocks) else None
            if block is None or len(block.memory) < size:
                self._drop(self._blocks[index : index + 1])
                block = self._new_block(size)
                self._blocks.insert(index, block)
            reader = memoryview(block.memory)[:size]
            block.reader = weakref.ref(reader)
            return torch.frombuffer(reader, dtype=torch.uint8)

    def release(self) -> None:
        """Release the blocks that no tensor uses."""
        with self._lock:
            self._drop([block for block in self._blocks if block.is_free])

    def _new_block(self, size: int) -> _Block:
        memory = mmap.mmap(-1, pinned_bytes(size))
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._pin(address, len(memory))
        return _Block(memory, address)

    def _drop(self, blocks: list[_Block]) -> None:
        if blocks:
            self._finish()
        for block in blocks:
            self._blocks.remove(block)
            self._unpin(block.address)
            block.memory.close()


class _Device(NamedTuple):
    """The stream of all copies from and to a device, and the pool of host memory that they use."""

    stream: torch.cuda.Stream
    pool: PinnedPool


_devices: dict[torch.device, _Device] = {}


class _Copy(NamedTuple):
    end: torch.cuda.Event
    # Source and target: their memory must not be reused before the copy ends, not even if an error ends the graph in
    # between. `Tensor.record_stream` would hold it for copies that began later, too.
    held: tuple[torch.Tensor, torch.Tensor]


# Copies in progress, by the address of the target.
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
    """Release the pinned memory that no offloaded activation uses."""
    for device in _devices.values():
        device.stream.synchronize()
    _forget_ended()
    for device in _devices.values():
        device.pool.release()


def _forget_ended() -> None:
    for address in [address for address, copy in _under_way.items() if copy.end.query()]:
        del _under_way[address]


def _span(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the first to the last, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 if tensor.numel() else 0


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat view from the first element to the last: torch copies non-contiguous tensors through pageable
    memory, and waits for it (`aten/src/ATen/native/cuda/Copy.cpp`, 2.13)."""
    return tensor.as_strided((_span(tensor),), (1,))


def _begin_copy(source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
    """Start a copy on the device's copy stream, overlapping computation; a reload begins when its offload has ended.

    The copy waits for all work issued to `device` so far: by then the source is computed, and the previous contents of
    the target's memory have been read.
    """
    _forget_ended()
    stream = _of(device).stream
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _flat(target).copy_(_flat(source), non_blocking=True)
        _under_way[target.data_ptr()] = _Copy(stream.record_event(), (source, target))


@torch.library.custom_op(f"{LIBRARY}::offload", mutates_args=(), tags=dynamo.CUDAGRAPH_UNSAFE)
def offload(activation: torch.Tensor) -> torch.Tensor:
    """Returns a host copy with the same strides, pinned if `activation` is on CUDA; complete after `wait`."""
    if not activation.is_cuda:
        host = torch.empty_strided(activation.shape, activation.stride(), dtype=activation.dtype)
        _flat(host).copy_(_flat(activation))
        return host
    memory = _of(activation.device).pool.take(max(1, _span(activation)) * activation.itemsize)
    host = memory.view(activation.dtype).as_strided(activation.shape, activation.stride())
    _begin_copy(activation, host, activation.device)
    return host


@offload.register_fake
def _(activation: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(activation.shape, activation.stride(), dtype=activation.dtype, device="cpu")


@torch.library.custom_op(f"{LIBRARY}::reload", mutates_args=(), tags=dynamo.CUDAGRAPH_UNSAFE)
def reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy on `device` with the same strides, complete after `wait`."""
    activation = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    if activation.is_cuda:
        _begin_copy(host, activation, activation.device)
    else:
        _flat(activation).copy_(_flat(host))
    return activation


@reload.register_fake
def _(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


# Not a `custom_op`, which must not return its argument.
_library = torch.library.Library(LIBRARY, "FRAGMENT")
_library.define("wait(Tensor(a) target, Tensor source, Tensor[] begun) -> Tensor(a)", tags=dynamo.CUDAGRAPH_UNSAFE)


@torch.library.impl(f"{LIBRARY}::wait", "CompositeExplicitAutograd")
def _wait(target: torch.Tensor, source: torch.Tensor, begun: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `target`, complete for all work issued to the GPU from now on.

    Args:
        source: the copy's source, read here so that inductor, which plans memory by reads, does not reuse its memory
            during the copy.
        begun: tensors that are computed, or whose copies have begun, before the wait. inductor orders operators by
            their reads, and would otherwise put the wait right after its own copy (torch's `ao::wait_tensor` has the
            same argument for its memory, 2.13).
    """
    if (copy := _under_way.pop(target.data_ptr(), None)) is not None:
        device = target.device if target.is_cuda else source.device
        torch.cuda.current_stream(device).wait_event(copy.end)
    return target


@torch.library.register_fake(f"{LIBRARY}::wait")
def _(target: torch.Tensor, source: torch.Tensor, begun: Sequence[torch.Tensor]) -> torch.Tensor:
    return target
