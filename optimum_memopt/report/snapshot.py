"""A step as a PyTorch memory snapshot, for its viewer (https://pytorch.org/memory_viz). Pure.

The format is that of `torch.cuda.memory._snapshot()` (torch 2.13): segments with the blocks held at the end, and a
trace of allocations and frees, each with frames. Here a frame is an operator, its file is the layer, and its line is
the operator's index in the step; `category` colors the viewer's timeline.
"""

import bisect
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from optimum_memopt.callbacks.memory_phases import MeasuredStep
from optimum_memopt.engines.api.predictions import StepTimeline

# First address, similar to those of a device.
_BASE = 0x7F0000000000
_ALLOC, _FREE = ("alloc",), ("free_requested", "free_completed")
_HELD, _PEAK = "held at the end of a phase", "more at the peak of the phase"


@dataclass(frozen=True)
class HeldBlock:
    """Memory that is held from one operator to another.

    Attributes:
        begin: index of the operator that allocates it.
        end: index of the operator before which it is freed; the number of operators: never freed.
    """

    category: str
    bytes: int
    begin: int
    end: int


def blocks_of(held: Mapping[str, Sequence[int]]) -> list[HeldBlock]:
    """Returns blocks that add up to the held bytes of each category at each operator.

    An increase of a category at an operator becomes one block. A decrease frees a block of that size, else the last
    blocks, in the order in which a backward frees them.
    """
    blocks: list[HeldBlock] = []
    for category, sizes in held.items():
        alive: list[HeldBlock] = []
        before = 0
        for index, size in enumerate(sizes):
            if size > before:
                alive.append(HeldBlock(category, size - before, index, len(sizes)))
            elif size < before:
                blocks += _freed(alive, before - size, index)
            before = size
        blocks += alive
    return sorted(blocks, key=lambda block: (block.begin, block.end))


def _freed(alive: list[HeldBlock], size: int, index: int) -> Iterator[HeldBlock]:
    """Yields freed blocks with `size` bytes in total, and removes them from `alive`."""
    place = next((place for place in reversed(range(len(alive))) if alive[place].bytes == size), None)
    if place is not None:
        yield replace(alive.pop(place), end=index)
        return
    while size:
        last = alive.pop()
        freed = min(size, last.bytes)
        if last.bytes > freed:
            alive.append(replace(last, bytes=last.bytes - freed))
        yield replace(last, bytes=freed, end=index)
        size -= freed


def predicted_snapshot(timeline: StepTimeline) -> bytes:
    return _pickled(timeline.held, timeline.operators, timeline.layers)


def measured_snapshot(step: MeasuredStep) -> bytes:
    """Returns the pickle of a measured step: each phase's peak, and the bytes held at its end."""
    held = [phase.held for phase in step.phases for _ in range(2)]
    peaks = [size for phase in step.phases for size in (max(0, phase.peak - phase.held), 0)]
    names = [name for phase in step.phases for name in (f"until {phase.name}", phase.name)]
    return _pickled({_HELD: held, _PEAK: peaks}, names, [""] * len(names))


def _pickled(held: Mapping[str, Sequence[int]], operators: Sequence[str], layers: Sequence[str]) -> bytes:
    frames = [
        [{"name": operator, "filename": layer, "line": index}]
        for index, (operator, layer) in enumerate(zip(operators, layers, strict=True))
    ]
    blocks, end = blocks_of(held), len(operators)
    # Tuples of operator index, whether it allocates, and block index; sorted, frees precede an operator's allocations.
    frees = [(block.end, False, number) for number, block in enumerate(blocks) if block.end < end]
    actions = sorted([*frees, *((block.begin, True, number) for number, block in enumerate(blocks))])
    addresses = [0] * len(blocks)
    # Currently held blocks, sorted by address.
    alive: list[tuple[int, HeldBlock]] = []
    trace: list[dict[str, Any]] = []
    for index, is_alloc, number in actions:
        block = blocks[number]
        if is_alloc:
            addresses[number] = _first_gap(alive, block.bytes)
            bisect.insort(alive, (addresses[number], block), key=itemgetter(0))
        else:
            alive.remove((addresses[number], block))
        # A free has the frames of its allocation.
        event = {
            "addr": addresses[number],
            "size": block.bytes,
            "stream": 0,
            "time_us": index,
            "frames": frames[block.begin],
            "category": block.category,
        }
        trace += [{"action": name, **event} for name in (_ALLOC if is_alloc else _FREE)]
    top = max((address + block.bytes for address, block in zip(addresses, blocks, strict=True)), default=_BASE)
    snapshot = {
        "segments": [_segment(alive, top, frames)],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
    # The viewer can read pickle protocol 4, which torch uses.
    return pickle.dumps(snapshot, protocol=4)


def _first_gap(alive: Sequence[tuple[int, HeldBlock]], size: int) -> int:
    """Returns the lowest free address with room for `size` bytes."""
    address = _BASE
    for begin, block in alive:
        if begin - address >= size:
            break
        address = begin + block.bytes
    return address


def _segment(
    kept: Sequence[tuple[int, HeldBlock]], top: int, frames: Sequence[list[dict[str, Any]]]
) -> dict[str, Any]:
    """Returns one segment up to the address `top`, with the blocks held at the end of the step."""
    parts: list[dict[str, Any]] = []

    def add(begin: int, end: int, state: str, frames: Sequence[dict[str, Any]] = ()) -> None:
        if size := end - begin:
            parts.append(
                {"address": begin, "size": size, "requested_size": size, "state": state, "frames": list(frames)}
            )

    address = _BASE
    for begin, block in kept:
        add(address, begin, "inactive")
        address = begin + block.bytes
        add(begin, address, "active_allocated", frames[block.begin])
    add(address, top, "inactive")
    held = sum(block.bytes for _, block in kept)
    return {
        "device": 0,
        "address": _BASE,
        "total_size": top - _BASE,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": parts,
    }
