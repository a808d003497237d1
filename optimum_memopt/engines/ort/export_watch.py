"""Detects side effects of a forward while it is traced, which an exported graph would drop."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch

from optimum_memopt.engines.ort import compat_torch
from optimum_memopt.engines.ort.support_checks import UnsupportedByOrt, abbreviate


@contextlib.contextmanager
def refuse_side_effects(module: torch.nn.Module) -> Iterator[None]:
    """Compare the tensors of `module`, and the random state of Python and numpy, before and after.

    Raises:
        UnsupportedByOrt: the forward wrote a buffer or a parameter, in place or by assignment, or drew random numbers
            outside of torch. ONNX Runtime would never update the former and reuse the same numbers at each step.
            Buffers and random states are restored, for the forward that runs instead.
    """
    before = {
        **{
            name: _TensorState(tensor, compat_torch.version(tensor), tensor.clone())
            for name, tensor in module.named_buffers()
        },
        **{name: _TensorState(tensor, compat_torch.version(tensor)) for name, tensor in module.named_parameters()},
    }
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    yield
    after = dict((*module.named_buffers(), *module.named_parameters()))
    changed = [name for name, state in before.items() if name in after and not state.is_current(after[name])]
    if changed:
        for name in changed:
            _restore_buffer(module, name, before[name])
        raise UnsupportedByOrt(
            f"its forward writes to {abbreviate(changed)}, which would not be updated, neither here nor in checkpoints"
        )
    generators = []
    if random.getstate() != python_state:
        random.setstate(python_state)
        generators.append("Python's random")
    if not all(numpy.array_equal(*pair) for pair in zip(numpy.random.get_state(), numpy_state, strict=True)):
        numpy.random.set_state(numpy_state)
        generators.append("numpy.random")
    if generators:
        raise UnsupportedByOrt(
            f"its forward draws from {' and '.join(generators)}, and the graph would use the same numbers at each "
            "step; use torch's random functions"
        )


@dataclass(frozen=True)
class _TensorState:
    """A tensor before the export; `copy` is taken of buffers only."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None = None

    def is_current(self, tensor: torch.Tensor) -> bool:
        return tensor is self.tensor and compat_torch.version(tensor) == self.version


def _restore_buffer(module: torch.nn.Module, name: str, state: _TensorState) -> None:
    if state.copy is None:
        return
    owner, _, leaf = name.rpartition(".")
    with torch.no_grad():
        state.tensor.copy_(state.copy)
    compat_torch.buffers(module.get_submodule(owner))[leaf] = state.tensor
