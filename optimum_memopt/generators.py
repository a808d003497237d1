"""Saves, compares and restores the random generators that a forward may draw from."""

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from optimum_memopt.compat.torch import without_modes

PYTHON, NUMPY, TORCH = "Python's random", "numpy.random", "torch"


@dataclass(frozen=True)
class GeneratorStates:
    """The states of Python's, NumPy's and torch's default generators.

    Attributes:
        cpu: state of the CPU's generator, as bytes so that torch modes of a running forward do not affect it.
        device: the GPU whose generator is included; None: no GPU.
    """

    python: Any
    numpy: Any
    cpu: bytes
    device: torch.device | None
    cuda: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device | None = None) -> "GeneratorStates":
        """Returns the current states, including that of `device` if it is a GPU."""
        gpu = device if device is not None and device.type == "cuda" else None
        with without_modes():
            cpu = torch.get_rng_state().numpy().tobytes()
        cuda = None if gpu is None else torch.cuda.get_rng_state(gpu)
        return cls(random.getstate(), numpy.random.get_state(), cpu, gpu, cuda)

    def changed(self) -> list[str]:
        """Returns the names of the generators that have drawn since."""
        now = GeneratorStates.of(self.device)
        is_numpy = all(numpy.array_equal(*pair) for pair in zip(now.numpy, self.numpy, strict=True))
        is_torch = now.cpu == self.cpu and (now.cuda is None or self.cuda is None or torch.equal(now.cuda, self.cuda))
        same = {PYTHON: now.python == self.python, NUMPY: is_numpy, TORCH: is_torch}
        return [name for name, is_same in same.items() if not is_same]

    def restore(self) -> None:
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        with without_modes():
            torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))
        if self.device is not None and self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


@contextlib.contextmanager
def preserved_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the CPU's generators after the block, and that of `device` if it is a GPU."""
    before = GeneratorStates.of(device)
    try:
        yield
    finally:
        before.restore()


def state_of(generator: object) -> Any:
    """Returns the state of a generator object of Python, NumPy or torch; None for any other object."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, numpy.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return generator.get_state()
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def set_state(generator: Any, state: Any) -> None:
    """Set a generator object to a state that `state_of` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
