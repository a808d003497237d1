"""The forwards of a model whose backward is still to come, and what they hold meanwhile."""

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from optimum_memopt.engines.api.run import ALONE, OtherForwards
from optimum_memopt.engines.compile.torch_compat import dynamo

# Of a batch, by the plan table's names.
BatchSizes = Mapping[str, int]
# Shares are rounded up to multiples of it, so that changing lengths do not cause a new plan in each step.
_STEP = 0.125


@dataclass(frozen=True)
class Forward:
    """One training forward of a step.

    Attributes:
        saved_before: bytes that earlier forwards have saved and still hold when it runs.
        is_followed: another forward ran before its backward. That one's backward comes first, so that the gradients
            of all parameters are there when its own begins.
    """

    sizes: BatchSizes
    saved_before: int = 0
    is_followed: bool = False

    def covers(self, other: "Forward") -> bool:
        """True where it needs at least the memory of `other`, which grows with every size."""
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
    """The bytes of steps under one plan: see `StepMemoryPredictor`."""

    largest_shapes: tuple[Forward, ...]

    def saved(self, sizes: BatchSizes | None = None) -> int: ...


@dataclass(frozen=True, eq=False)
class PendingForward:
    """A forward whose backward is still to come.

    Attributes:
        predictor: of the plan that it has run under.
        elements: of its largest input.
    """

    predictor: PlanBytes
    forward: Forward
    elements: int


class Pending:
    """The forwards of one model whose backward is still to come, under any plan, oldest first: several where a step
    runs several before one backward, as contrastive losses do.

    Attributes:
        most: see `Run.others`; as far as they were counted.
    """

    def __init__(self) -> None:
        self.most = ALONE
        self._forwards: dict[int, PendingForward] = {}
        # Numbers of pending forwards whose plan has been replaced.
        self._replaced: frozenset[int] = frozenset()
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[PendingForward]:
        # A copy, since the garbage collector may drop a graph at any time.
        return iter(tuple(self._forwards.values()))

    @property
    def saved_bytes(self) -> int:
        """Bytes that they hold."""
        return sum(noted.predictor.saved(noted.forward.sizes) for noted in self)

    def saved_in_steps(self, plan: PlanBytes) -> int:
        """Bytes that they will hold in steps to come: under this plan, where theirs has been replaced."""
        noted = tuple(self._forwards.items())
        return sum(
            (plan if number in self._replaced else each.predictor).saved(each.forward.sizes) for number, each in noted
        )

    def replace_plan(self) -> None:
        """Mark all pending forwards as run under a replaced plan."""
        self._replaced = frozenset(self._forwards)

    def count(self, inputs: Mapping[str, object]) -> bool:
        """Count them beside another forward, which is given these inputs; true where they are more than ever."""
        if not self._forwards:
            return False
        elements = [*(noted.elements for noted in self), elements_of(inputs)]
        largest, before = max(elements), self.most
        # Without the share of the largest forward, which is assumed to be the running one.
        earlier, between = (_rounded(max(0.0, sum(held) / largest - 1)) for held in (elements, elements[:-1]))
        self.most = OtherForwards(max(before.earlier, earlier), max(before.between, between))
        return self.most != before

    def add(self, forward: PendingForward, outputs: Any) -> None:
        """Count a forward until its backward runs, or nothing refers to its autograd graph any more."""
        tensors = (leaf for leaf in dynamo.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
        if nodes := {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}:
            number = next(self._numbers)
            self._forwards[number] = forward
            release = _Release(self._forwards, number)
            for node in nodes:
                # Not behind it: for such a hook autograd holds what the backward is given until it is done.
                node.register_prehook(release)


class _Release:
    """Hook of autograd nodes. Nothing else refers to it, so it is deleted with the last of them."""

    def __init__(self, forwards: dict[int, Any], number: int) -> None:
        self._release = weakref.finalize(self, forwards.pop, number, None)
        self._release.atexit = False

    def __call__(self, *gradients: Any) -> None:
        self._release()


def _rounded(share: float) -> float:
    return math.ceil(share / _STEP) * _STEP


def elements_of(inputs: Mapping[str, object]) -> int:
    """Returns the elements of the largest input, which grow as a batch's tokens or pixels."""
    return max((value.numel() for value in inputs.values() if isinstance(value, torch.Tensor)), default=1)
