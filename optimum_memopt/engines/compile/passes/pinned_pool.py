"""Pinned memory of the host for offloaded activations.

torch's allocator takes the next power of two for each tensor: 64 MiB for one of 48
(`aten/src/ATen/core/CachingHostAllocator.h`, 2.13). Here a tensor takes its pages.
"""

import mmap
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch


def pinned_bytes(size: int) -> int:
    """What a tensor of so many bytes takes of the host."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(eq=False)
class _Block:
    """
    Attributes:
        memory: shared, since a private page that a child process also has is copied when it is written, and the device
            would go on with the old one.
        address: of it.
        reader: torch holds it as long as a tensor has this memory, views and what autograd saves included.
    """

    memory: mmap.mmap
    address: int
    reader: "weakref.ref[memoryview] | None" = None

    @property
    def is_free(self) -> bool:
        return self.reader is None or self.reader() is None


class PinnedPool:
    """Memory for the copies of one stream of a device.

    A block is given out again as soon as the last tensor with its memory is gone, though a copy from it may be under
    way: the next copy into it is asked of the same stream, which keeps their order. The host itself does not write.

    Args:
        pin: the pages of an address and a number of bytes.
        unpin: those at an address.
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
        """Pinned now, whether a tensor has it or not."""
        return sum(len(block.memory) for block in self._blocks)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes without values.

        They come from the first free block, or a larger one takes its place: the tensors of a step come in the order
        of its graph, so each block grows to the largest that its tensor has been. The best fit would give a larger
        tensor's block to a smaller one whenever batches grow.
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
        """Give back what no tensor has."""
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
