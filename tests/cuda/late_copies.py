"""A process whose device copies as late as possible: saved activations must come back intact, or it exits with 1.

    CUDA_STANDIN_DATA=1 python late_copies.py [--without-waits]

No kernel writes on the stand-in, so freed memory is overwritten by copies from the host, as by a later tensor.
"""

import sys

import torch

from optimum_memopt.engines.compile.partition import host_copies

# Elements of an activation, by round: the pool must grow, and must give larger blocks to smaller activations.
ELEMENTS = (2**20, 2**19, 5 * 2**18)
ROUNDS, ACTIVATIONS, AHEAD = 100, 6, 2
operators = torch.ops.optimum_memopt


def on_device(value: float, elements: int) -> torch.Tensor:
    return torch.full((elements,), value).cuda()


def overwrite(elements: int) -> None:
    tensors = [on_device(-99.0, elements) for _ in range(4)]
    del tensors


def wait(target: torch.Tensor, source: torch.Tensor, waits: bool) -> torch.Tensor:
    if waits:
        return operators.wait(target, source, [])
    host_copies._under_way.clear()
    return target


def training_step(first: float, elements: int, waits: bool) -> list[float]:
    """Returns the activations' values after offload and reload, last one first."""
    begun: list[tuple[torch.Tensor, torch.Tensor]] = []
    hosts: list[torch.Tensor] = []
    for index in range(ACTIVATIONS):
        activation = on_device(first + index, elements)
        begun.append((operators.offload(activation), activation))
        del activation
        if len(begun) > AHEAD:
            hosts.append(wait(*begun.pop(0), waits))
        overwrite(elements)
    while begun:
        hosts.append(wait(*begun.pop(0), waits))
    overwrite(elements)
    values: list[float] = []
    reloaded: list[tuple[torch.Tensor, torch.Tensor]] = []
    while hosts or reloaded:
        if hosts:
            host = hosts.pop()
            reloaded.append((operators.reload(host, torch.device("cuda", 0)), host))
            del host
        if len(reloaded) > AHEAD or not hosts:
            activation = wait(*reloaded.pop(0), waits)
            overwrite(elements)
            found = activation.cpu()
            values.append(found[0].item() if torch.equal(found, found[:1].expand_as(found)) else float("nan"))
            del activation
    return values


def main(waits: bool) -> int:
    """Returns the number of steps with wrong values."""
    wrong = 0
    for number in range(ROUNDS if waits else 1):
        first = float(10 * number)
        expected = [first + index for index in reversed(range(ACTIVATIONS))]
        wrong += training_step(first, ELEMENTS[number % len(ELEMENTS)], waits) != expected
    return wrong


if __name__ == "__main__":
    found = main(waits="--without-waits" not in sys.argv)
    ((_, pool),) = host_copies._devices.values()
    blocks = pool.bytes / (4 * max(ELEMENTS))
    print(f"{found} wrong, {len(host_copies._under_way)} copies under way, {blocks:g} activations pinned")
    sys.exit(1 if found else 0)
