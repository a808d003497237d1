"""A process that sends random requests to torch's allocator and to the simulated one: both must agree."""

import random
import sys

import torch

from optimum_memopt.engines.simulator.allocator import CachingAllocator


def main(seed: int, requests: int = 2000) -> None:
    draw = random.Random(seed)
    simulated, held = CachingAllocator(), []
    for _ in range(requests):
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
    print(f"{simulated.allocated} bytes allocated, {simulated.reserved} reserved")


if __name__ == "__main__":
    main(int(sys.argv[1]))
