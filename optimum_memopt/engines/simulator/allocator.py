"""Simulates torch's CUDA caching allocator: the blocks that requests get, and the memory that it reserves. Pure.

Follows `c10/cuda/CUDACachingAllocator.cpp` (2.13) with default settings and one stream: best fit, blocks are split if
enough remains, and free neighbours are merged. `expandable_segments` reserves less. On a full device the real
allocator first returns unused segments; this one has no such limit.
"""

import bisect
import itertools
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from optimum_memopt.engines.simulator.events import Event
from optimum_memopt.sizes import MIB

_GRANULE = 512
# Requests up to this size share small segments.
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_MEDIUM = 10 * MIB
_MEDIUM_SEGMENT = 20 * MIB
_LARGE_GRANULE = 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Attributes:
        address: address of its first byte; segments are ordered by the time of their reservation.
        is_small: whether its segment is for small requests.
        before: the preceding block in the same segment; `after` is the following one.
    """

    size: int
    address: int
    is_small: bool
    is_free: bool = False
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)


class CachingAllocator:
    """Allocates and frees blocks.

    Attributes:
        allocated: bytes of all blocks in use.
        reserved: bytes of all segments.
        most_allocated: highest `allocated` so far.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.most_allocated = 0
        self._addresses = itertools.count(0, 2**40)
        # Free blocks sorted by size and address; True: for small requests.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Returns a block of at least `size` bytes."""
        size = max(_GRANULE, _up(size, _GRANULE))
        block = self._best_fit(size) or self._new_segment(size)
        remaining = block.size - size
        if remaining >= _GRANULE if block.is_small else remaining > _SMALL:
            self._split(block, size)
        block.is_free = False
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        block.is_free = True
        for left, right in ((block.before, block), (block, block.after)):
            if left is None or right is None or not (left.is_free and right.is_free):
                continue
            other = left if right is block else right
            self._free[block.is_small].remove((other.size, other.address, other))
            block.address = left.address
            block.size = left.size + right.size
            block.before, block.after = left.before, right.after
        if block.before is not None:
            block.before.after = block
        if block.after is not None:
            block.after.before = block
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def run(self, events: Iterable[Event]) -> list[Block]:
        """Allocate and free as in these events.

        Returns:
            The blocks that are still allocated.
        """
        blocks: dict[str, Block] = {}
        for event in events:
            for storage in event.allocates:
                if storage.bytes:
                    blocks[storage.name] = self.allocate(storage.bytes)
            if event.workspace:
                self.free(self.allocate(event.workspace))
            for name in event.frees:
                if name in blocks:
                    self.free(blocks.pop(name))
        return list(blocks.values())

    def _best_fit(self, size: int) -> Block | None:
        blocks = self._free[size <= _SMALL]
        index = bisect.bisect_left(blocks, (size, -1))
        return blocks.pop(index)[2] if index < len(blocks) else None

    def _new_segment(self, size: int) -> Block:
        is_small = size <= _SMALL
        segment = _SMALL_SEGMENT if is_small else _MEDIUM_SEGMENT if size < _MEDIUM else _up(size, _LARGE_GRANULE)
        self.reserved += segment
        return Block(segment, next(self._addresses), is_small)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.address + size, block.is_small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        bisect.insort(self._free[block.is_small], (rest.size, rest.address, rest))


def _up(size: int, granule: int) -> int:
    return -(-size // granule) * granule


def pinned_bytes(size: int) -> int:
    """Returns the bytes of a tensor in pinned host memory, in whole pages (`partition/host_copies.py`)."""
    return _up(size, mmap.PAGESIZE)


@dataclass(frozen=True)
class AllocatorPeak:
    """The peak of training, in bytes: of the blocks in use, and of the device memory reserved for them."""

    allocated: int
    reserved: int


def allocator_peak(
    always: Iterable[int], graphs: Sequence[Event], states: Sequence[int], temporary: int, later: Sequence[Event] = ()
) -> AllocatorPeak:
    """Returns the peak of three steps: optimizer states exist from the second step on, and the third step starts from
    the cached blocks of the second.

    Args:
        always: bytes of blocks that are never freed: parameters, buffers, the batch, workspaces of libraries.
        graphs: events of a forward and its backward; the storages that they leave are gradients.
        states: bytes of each optimizer state, from the optimizer's first step on.
        temporary: temporary bytes of each optimizer step.
        later: events of a later micro-batch, whose gradients are accumulated into existing ones; empty: there is only
            one micro-batch.
    """
    allocator = CachingAllocator()
    for size in always:
        allocator.allocate(size)
    for is_first in (True, False, False):
        gradients = allocator.run(graphs)
        for block in allocator.run(later):
            allocator.free(block)
        if is_first:
            for size in states:
                allocator.allocate(size)
        if temporary:
            allocator.free(allocator.allocate(temporary))
        for block in gradients:
            allocator.free(block)
    return AllocatorPeak(allocator.most_allocated, allocator.reserved)
