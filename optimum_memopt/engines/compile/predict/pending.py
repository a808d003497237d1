"""Training forwards whose saved activations are in memory, several at a time where a step runs several forwards before
one backward, as contrastive losses do."""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from optimum_memopt.engines.compile.torch_compat import dynamo

# Of a batch, by the plan table's names.
BatchSizes = Mapping[str, int]
_Noted = TypeVar("_Noted")


@dataclass(frozen=True)
class Forward:
    """A training forward among those of the same step.

    Attributes:
        sizes: of its batch.
        saved_before: bytes that earlier forwards have saved and still hold when it runs.
        is_followed: another forward ran before its backward. That one's backward comes first, so that the gradients
            of all parameters are there when its own begins.
    """

    sizes: BatchSizes
    saved_before: int = 0
    is_followed: bool = False

    def covers(self, other: "Forward") -> bool:
        """Whether it needs at least the memory of `other`, which grows with every size."""
        return (
            self.sizes.keys() == other.sizes.keys()
            and all(self.sizes[name] >= size for name, size in other.sizes.items())
            and self.saved_before >= other.saved_before
            and self.is_followed >= other.is_followed
        )


def largest_shapes(seen: Iterable[Forward], new: Forward) -> tuple[Forward, ...]:
    """`seen` and `new` without those that another one covers."""
    seen = tuple(seen)
    if any(forward.covers(new) for forward in seen):
        return seen
    return (*(forward for forward in seen if not new.covers(forward)), new)


class Pending(Generic[_Noted]):
    """The forwards of one model whose backward is still to come, oldest first."""

    def __init__(self) -> None:
        self._forwards: dict[int, _Noted] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[_Noted]:
        # A copy, since the garbage collector may drop a graph at any time.
        return iter(tuple(self._forwards.values()))

    def add(self, forward: _Noted, outputs: Any) -> None:
        """Count a forward until its backward has run, or nothing refers to its autograd graph any more.

        Args:
            forward: what is known of it.
            outputs: what it has returned.
        """
        tensors = (leaf for leaf in dynamo.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        if not nodes:
            return
        number = next(self._numbers)
        self._forwards[number] = forward
        release = _Release(self._forwards, number)
        for node in nodes:
            node.register_hook(release)


class _Release:
    """Hook of autograd nodes. Nothing else refers to it, so it is deleted with the last of them."""

    def __init__(self, forwards: dict[int, Any], number: int) -> None:
        self._release = weakref.finalize(self, forwards.pop, number, None)
        self._release.atexit = False

    def __call__(self, *gradients: Any) -> None:
        self._release()
