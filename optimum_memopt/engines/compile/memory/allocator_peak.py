"""What torch's CUDA allocator takes for training steps, beyond the bytes that tensors ask for. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optimum_memopt.engines.compile.memory.caching_allocator import Block, CachingAllocator
from optimum_memopt.engines.compile.memory.requests import Request


@dataclass(frozen=True)
class AllocatorPeak:
    """Bytes at the peak of training.

    Attributes:
        allocated: of the blocks that tensors lie in.
        reserved: of the device.
    """

    allocated: int
    reserved: int


@dataclass(frozen=True)
class StepRequests:
    """What training steps ask for, in bytes.

    Attributes:
        always: blocks that stay: parameters, buffers, the batch, workspaces of libraries.
        graphs: of a forward and its backward; what is left are gradients.
        states: of the optimizer, from its first step on.
        temporary: of each of the optimizer's steps.
        accumulates: gradients of a micro-batch are added to those of earlier ones.
    """

    always: Sequence[int]
    graphs: Sequence[Request]
    states: Sequence[int]
    temporary: int
    accumulates: bool


def allocator_peak(step: StepRequests) -> AllocatorPeak:
    """Of two steps: the first one leaves the optimizer's states and cached blocks to the second."""
    allocator = CachingAllocator()
    for size in step.always:
        allocator.allocate(size)
    for is_first in (True, False):
        gradients = _run(allocator, step.graphs)
        if step.accumulates:
            for block in _run(allocator, step.graphs):
                allocator.free(block)
        if is_first:
            for size in step.states:
                allocator.allocate(size)
        if step.temporary:
            allocator.free(allocator.allocate(step.temporary))
        for block in gradients:
            allocator.free(block)
    return AllocatorPeak(allocator.most_allocated, allocator.reserved)


def _run(allocator: CachingAllocator, requests: Iterable[Request]) -> list[Block]:
    """The blocks that are left."""
    blocks: dict[str, Block] = {}
    for storage, size in requests:
        if size:
            blocks[storage] = allocator.allocate(size)
        elif storage in blocks:
            allocator.free(blocks.pop(storage))
    return list(blocks.values())
