"""The kind of a batch. Batches of one kind run the same graphs, as far as can be predicted, under one plan."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from optimum_memopt.engines.torch_compat.attention import KeptMasks

# The arguments of a forward by their paths, each with the properties that torch guards on.
InputKinds = frozenset[tuple[str, Hashable]]
# torch makes sizes 0 and 1 constants of a graph, and any other size a symbol.
_SYMBOLIC = 2
_LONGEST_NAME = 64
_QUOTED = 3


class BatchKind(NamedTuple):
    """The properties of a batch that a plan depends on.

    Attributes:
        masks: attention masks that are made for the batch.
        trains: for each parameter of the model, whether it trains.
        inputs: kinds of the arguments; empty if ranks must plan alike, or without a budget.
    """

    masks: KeptMasks
    trains: tuple[bool, ...]
    inputs: InputKinds = frozenset()

    def first_after(self, other: "BatchKind") -> str:
        """Describes the first batch of this kind after one of another kind."""
        if self.masks != other.masks:
            return self.masks.first_after(other.masks)
        if self.trains != other.trains:
            return "the trained parameters changed"
        now, before = dict(self.inputs), dict(other.inputs)
        changed = sorted({path for path, _ in self.inputs ^ other.inputs})
        texts = [_text(path, now, before) for path in changed[:_QUOTED]]
        return f"the first batch with {', '.join(texts) or 'other inputs'}{', …' if len(changed) > _QUOTED else ''}"


def input_kinds(args: Sequence[Any], inputs: Mapping[str, Any]) -> InputKinds:
    """Returns the properties of arguments that torch guards on: type and constant sizes of tensors, values of flags
    and names. Values of numbers are left out, since they may differ in every step."""
    return frozenset((*_kinds((f"argument {at}", value) for at, value in enumerate(args)), *_kinds(inputs.items())))


def _kinds(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Hashable]]:
    for name, value in items:
        path = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            sizes = () if value.is_nested else tuple(min(size, _SYMBOLIC) for size in value.shape)
            yield path, (value.dtype, value.requires_grad, sizes)
        elif isinstance(value, Mapping):
            yield from _kinds(value.items(), f"{path}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor | Mapping):
            yield from _kinds(enumerate(value), f"{path}.")
        elif value is None or isinstance(value, bool) or (isinstance(value, str) and len(value) <= _LONGEST_NAME):
            yield path, value
        else:
            yield path, type(value).__qualname__


def _text(path: str, now: Mapping[str, Hashable], before: Mapping[str, Hashable]) -> str:
    if path not in now:
        return f"no {path}"
    if (kind := now[path]) is None or isinstance(kind, bool | str):
        return f"{path}={kind!r}"
    return f"{path} of a different type or shape" if path in before else path
