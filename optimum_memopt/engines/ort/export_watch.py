"""Notices, while a model is traced, what its forward does beside computing: a graph would leave that out."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch

from optimum_memopt.engines.ort.support_checks import Unsuitable, some


@contextlib.contextmanager
def side_effects_refused(module: torch.nn.Module) -> Iterator[None]:
    """Compare the tensors of `module`, and Python's and numpy's random generators, before and after.

    Raises:
        Unsuitable: the forward rewrote a buffer or a parameter, in place or with another one, or drew numbers outside
            of torch. ONNX Runtime would keep the former as it was and use the same numbers at each step. Buffers and
            generators are set back, for the forward that runs instead.
    """
    tensors = {
        **{name: _Tensor(tensor, _version(tensor), tensor.clone()) for name, tensor in module.named_buffers()},
        **{name: _Tensor(tensor, _version(tensor)) for name, tensor in module.named_parameters()},
    }
    python, numbers = random.getstate(), numpy.random.get_state()
    yield
    after = dict((*module.named_buffers(), *module.named_parameters()))
    changed = [
        name
        for name, was in tensors.items()
        if name in after and (after[name] is not was.tensor or _version(after[name]) != was.version)
    ]
    if changed:
        for name in changed:
            _restore(module, name, tensors[name])
        raise Unsuitable(f"its forward rewrites {some(changed)}, which would stay as it was, in checkpoints too")
    drawn = []
    if random.getstate() != python:
        random.setstate(python)
        drawn.append("Python's random")
    if not all(numpy.array_equal(*pair) for pair in zip(numpy.random.get_state(), numbers, strict=True)):
        numpy.random.set_state(numbers)
        drawn.append("numpy.random")
    if drawn:
        raise Unsuitable(
            f"its forward draws from {' and '.join(drawn)}, and the graph would use the same numbers at each step; "
            "draw tensors with torch"
        )


@dataclass(frozen=True)
class _Tensor:
    """A tensor as it was; only of buffers is there a copy."""

    tensor: torch.Tensor
    version: int
    copied: torch.Tensor | None = None


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _restore(module: torch.nn.Module, name: str, was: _Tensor) -> None:
    if was.copied is None:
        return
    owner, _, leaf = name.rpartition(".")
    with torch.no_grad():
        was.tensor.copy_(was.copied)
    module.get_submodule(owner)._buffers[leaf] = was.tensor
