"""Tracks the forwards of a model whose backward has not run yet, and the bytes that they hold."""

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimum_memopt.engines.api.run import ALONE, OtherForwards
from optimum_memopt.engines.torch_compat import dynamo

# Sizes of a batch, by the plan table's names.
BatchSizes = Mapping[str, int]
# Shares are rounded up to multiples of this, so that changing lengths do not cause a new plan at each step.
_STEP = 0.125


@dataclass(frozen=True)
class Forward:
    """One training forward of a step.

    Attributes:
        saved_before: bytes of saved activations that earlier forwards still hold when it runs.
        is_followed: another forward ran before its backward. The later forward's backward runs first, so the gradients
            of all parameters exist when its own begins.
    """

    sizes: BatchSizes
    saved_before: int = 0
    is_followed: bool = False

    def covers(self, other: "Forward") -> bool:
        """True if it needs at least the memory of `other`; memory grows with every size."""
        return (
            self.sizes.keys() == other.sizes.keys()
            and all(self.sizes[name] >= size for name, size in other.sizes.items())
            and self.saved_before >= other.saved_before
            and self.is_followed >= other.is_followed
        )


def largest_shapes(seen: Iterable[Forward], new: Forward) -> tuple[Forward, ...]:
    """Returns the forwards among `seen` and `new` that no other one covers."""
    seen = tuple(seen)
    if any(forward.covers(new) for forward in seen):
        return seen
    return (*(forward for forward in seen if not new.covers(forward)), new)


class PlanBytes(Protocol):
    """Predicts the bytes of steps under one plan, see `StepMemoryPredictor`."""

    largest_shapes: tuple[Forward, ...]

    def saved(self, sizes: BatchSizes | None = None) -> int: ...


@dataclass(frozen=True, eq=False)
class PendingForward:
    """A forward whose backward has not run yet.

    Attributes:
        predictor: predictor of the plan that the forward ran under.
        elements: number of elements of its largest input.
    """

    predictor: PlanBytes
    forward: Forward
    elements: int


class Pending:
    """The pending forwards of one model under any plan, oldest first: several if a step runs several forwards before
    one backward, as contrastive losses do.

    Attributes:
        most: the highest shares counted so far, see `Run.others`.
    """

    def __init__(self) -> None:
        self.most = ALONE
        self._forwards: dict[int, PendingForward] = {}
        # Numbers of pending forwards whose plan has been replaced.
        self._replaced: frozenset[int] = frozenset()
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[PendingForward]:
        # A copy, since the garbage collector may free an autograd graph, and remove its forward, at any time.
        return iter(tuple(self._forwards.values()))

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes that the pending forwards hold."""
        return sum(noted.predictor.saved(noted.forward.sizes) for noted in self)

    @property
    def numbers(self) -> frozenset[int]:
        """Returns the numbers of the pending forwards, for `keep`."""
        return frozenset(self._forwards)

    def keep(self, numbers: frozenset[int]) -> None:
        """Drop all other forwards: their outputs were discarded, and no backward will run. A reference cycle may keep
        their autograd graphs until the garbage collector runs."""
        for number in self.numbers - numbers:
            self._forwards.pop(number, None)

    def saved_in_steps(self, plan: PlanBytes) -> int:
        """Returns the bytes that they will hold in later steps: under `plan`, if their own has been replaced."""
        noted = tuple(self._forwards.items())
        return sum(
            (plan if number in self._replaced else each.predictor).saved(each.forward.sizes) for number, each in noted
        )

    def replace_plan(self) -> None:
        """Mark all pending forwards as run under a replaced plan."""
        self._replaced = frozenset(self._forwards)

    def count(self, inputs: Mapping[str, object]) -> bool:
        """Count the pending forwards as another one with these inputs runs; True if they hold more than ever."""
        if not self._forwards:
            return False
        elements = [*(noted.elements for noted in self), elements_of(inputs)]
        largest, before = max(elements), self.most
        # Without the largest forward's share: it is assumed to be the running one.
        earlier, between = (_rounded(max(0.0, sum(held) / largest - 1)) for held in (elements, elements[:-1]))
        self.most = OtherForwards(max(before.earlier, earlier), max(before.between, between))
        return self.most != before

    def add(self, forward: PendingForward, outputs: Any) -> None:
        """Add a forward until its backward runs, or its autograd graph is freed."""
        tensors = (leaf for leaf in dynamo.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        if nodes := {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}:
            number = next(self._numbers)
            self._forwards[number] = forward
            release = _Release(self._forwards, number)
            for node in nodes:
                # Not a post-hook: for those, autograd keeps the backward's incoming gradients alive until it ends.
                node.register_prehook(release)


class _Release:
    """A pre-hook of autograd nodes. Only the nodes refer to it, so it is deleted with the last of them."""

    def __init__(self, forwards: dict[int, Any], number: int) -> None:
        self._release = weakref.finalize(self, forwards.pop, number, None)
        self._release.atexit = False

    def __call__(self, *gradients: Any) -> None:
        self._release()


def _rounded(share: float) -> float:
    return math.ceil(share / _STEP) * _STEP


def elements_of(inputs: Mapping[str, object]) -> int:
    """Returns the number of elements of the largest input, which grows with a batch's tokens or pixels."""
    return max((value.numel() for value in inputs.values() if isinstance(value, torch.Tensor)), default=1)
