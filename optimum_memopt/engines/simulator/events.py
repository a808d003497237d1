"""Event streams of the storages that a step allocates and frees, and folds over them. Pure.

The recorder (`recorder.py`) writes the events of plain PyTorch; an engine writes the events of its graphs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from optimum_memopt.engines.api.layer_paths import equal_layers
from optimum_memopt.engines.api.predictions import BATCH, CATEGORIES, GRADIENTS, OPTIMIZER, TEMPORARY, Group

# Categories whose storages are shown together.
_OF_THE_MODEL = (OPTIMIZER, BATCH, GRADIENTS)


class Storage(NamedTuple):
    """The memory behind one or more tensors.

    Attributes:
        name: unique among the storages held at the same time.
        category: one of `predictions.CATEGORIES`.
        kind: cluster id of a saved activation that has one, else the operator that allocates it, `gelu`.
        layer: path of the transformer layer; empty outside of all layers.
        module: path of the allocating module, relative to its layer, or to the model outside of layers.
    """

    name: str
    bytes: int
    category: str = TEMPORARY
    kind: str = ""
    layer: str = ""
    module: str = ""


class Event(NamedTuple):
    """The allocations and frees of an operator, or of a moment between two of them.

    Attributes:
        operator: the name of its node, or of the storage that a compiled program allocates; empty between operators.
        kind: the operator's name, `gelu`.
        layer: path of the transformer layer; empty outside of all layers.
        allocates: storages allocated before the operator runs.
        workspace: bytes that the operator holds while it runs, beside its results.
        frees: names of the storages freed after the operator has run.
    """

    operator: str
    kind: str = ""
    layer: str = ""
    allocates: tuple[Storage, ...] = ()
    workspace: int = 0
    frees: tuple[str, ...] = ()

    def resized(self, size: Callable[[int], int]) -> "Event":
        """Returns the event with `size` of each number of bytes."""
        allocates = tuple(each._replace(bytes=size(each.bytes)) for each in self.allocates)
        return self._replace(allocates=allocates, workspace=size(self.workspace))


def held_before(events: Iterable[Event]) -> dict[str, Storage]:
    """Returns the storages held after these events, before the next one allocates, by name."""
    held: dict[str, Storage] = {}
    for event in events:
        held.update((storage.name, storage) for storage in event.allocates)
        for name in event.frees:
            held.pop(name, None)
    return held


def held_during(events: Sequence[Event], index: int) -> tuple[Storage, ...]:
    """Returns the storages held during an event, its workspace as a storage of its own."""
    event = events[index]
    module = event.allocates[0].module if event.allocates else ""
    workspace = Storage("", event.workspace, TEMPORARY, f"{event.kind} workspace", event.layer, module)
    held = held_before(events[:index])
    held.update((storage.name, storage) for storage in event.allocates)
    return (*held.values(), *([workspace] if event.workspace else []))


def bytes_during(events: Iterable[Event]) -> tuple[list[int], int]:
    """Returns the bytes held during each event, and those held after the last."""
    sizes: dict[str, int] = {}
    held, during = 0, []
    for event in events:
        for storage in event.allocates:
            sizes[storage.name] = storage.bytes
            held += storage.bytes
        during.append(held + event.workspace)
        for name in event.frees:
            held -= sizes.pop(name, 0)
    return during, held


def bytes_by_category(events: Iterable[Event]) -> Iterator[dict[str, int]]:
    """Yields the bytes held during each event, by category; a workspace counts as temporary."""
    now = dict.fromkeys(CATEGORIES, 0)
    sizes: dict[str, tuple[str, int]] = {}
    for event in events:
        for storage in event.allocates:
            sizes[storage.name] = storage.category, storage.bytes
            now[storage.category] += storage.bytes
        yield {**now, TEMPORARY: now[TEMPORARY] + event.workspace}
        for category, size in (sizes.pop(name) for name in event.frees if name in sizes):
            now[category] -= size


def groups(storages: Iterable[Storage]) -> list[Group]:
    """Returns tensors grouped by kind across equal layers; optimizer states, batch and gradients by category only."""
    kinds: dict[tuple[str, ...], list[Storage]] = {}
    for storage in storages:
        key = (storage.kind, equal_layers(storage.layer), storage.module)
        key = key if storage.category not in _OF_THE_MODEL else ("", "", "")
        kinds.setdefault((storage.category, *key), []).append(storage)
    groups = []
    for (category, kind, _, module), of_kind in kinds.items():
        if held := [storage for storage in of_kind if storage.bytes]:
            layers = () if category in _OF_THE_MODEL else dict.fromkeys(each.layer for each in held if each.layer)
            size = sum(storage.bytes for storage in held)
            groups.append(Group(category, kind, len(held), size, tuple(layers), module))
    return groups


@dataclass(frozen=True)
class StepEvents:
    """The events of a forward and its backward; events without an operator stand between two operators.

    Attributes:
        events: the forwards of all graphs, the event at which the caller drops tensors, a loss outside of the graphs,
            the event that allocates the tangents, and the backwards.
        forward_end: index of the last event before the backward.
        outputs: bytes of the forward's results that its caller holds after the backward.
        earlier_outputs: bytes of the previous step's results, held until this forward has returned.
    """

    events: tuple[Event, ...]
    forward_end: int
    outputs: int = 0
    earlier_outputs: int = 0

    @property
    def saved_bytes(self) -> int:
        """Returns the bytes held between forward and backward."""
        return bytes_during(self.events[: self.forward_end + 1])[1]

    def peak(self, gradients: int = 0) -> int:
        """Returns the peak in bytes.

        Args:
            gradients: bytes of gradients that exist from the start of the backward, but not in the forward.
        """
        during, _ = bytes_during(self.events)
        return max(size + gradients * (index > self.forward_end) for index, size in enumerate(during))


def interpolated(low: StepEvents, high: StepEvents, share: float) -> StepEvents | None:
    """Returns a step whose storage sizes are interpolated linearly between two steps; None if their operators differ.

    Args:
        share: 0: the sizes of `low`; 1: the sizes of `high`; values outside this range extrapolate.
    """

    def size(first: int, second: int) -> int:
        return max(0, round(first + share * (second - first)))

    def event(first: Event, second: Event) -> Event:
        storages = zip(first.allocates, second.allocates, strict=True)
        return first._replace(
            allocates=tuple(one._replace(bytes=size(one.bytes, other.bytes)) for one, other in storages),
            workspace=size(first.workspace, second.workspace),
        )

    if len(low.events) != len(high.events) or low.forward_end != high.forward_end:
        return None
    pairs = list(zip(low.events, high.events, strict=True))
    if any(one.kind != other.kind or len(one.allocates) != len(other.allocates) for one, other in pairs):
        return None
    outputs, earlier = size(low.outputs, high.outputs), size(low.earlier_outputs, high.earlier_outputs)
    return StepEvents(tuple(itertools.starmap(event, pairs)), low.forward_end, outputs, earlier)
