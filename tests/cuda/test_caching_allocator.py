"""The simulated allocator against torch's."""

import random

import pytest
import torch

from optimum_memopt.engines.compile.memory.caching_allocator import CachingAllocator


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_requests(seed: int) -> None:
    draw = random.Random(seed)
    simulated, held = CachingAllocator(), []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert not allocated and not reserved
    for _ in range(2000):
        if held and draw.random() < 0.48:
            tensor, block = held.pop(draw.randrange(len(held)))
            del tensor
            simulated.free(block)
        else:
            size = int(2 ** draw.uniform(0, 26))
            held.append((torch.empty(size, device="cuda", dtype=torch.uint8), simulated.allocate(size)))
        assert simulated.allocated == torch.cuda.memory_allocated()
    assert simulated.most_allocated == torch.cuda.max_memory_allocated()
    assert simulated.reserved == torch.cuda.memory_reserved()
