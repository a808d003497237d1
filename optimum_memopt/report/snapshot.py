"""A step as a memory snapshot of PyTorch's format, which its viewer opens (https://pytorch.org/memory_viz). Pure.

The format is that of `torch.cuda.memory._snapshot()` (torch 2.13): segments with the blocks that are held at the end,
and a trace of allocations and frees, each with frames. Here a frame is an operator, its file the layer, its line the
operator's place in the step; `category` colors the viewer's timeline.
"""

import bisect
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimum_memopt.engines.api.predictions import StepTimeline
from optimum_memopt.report.data import MeasuredStep

_MIB = 2**20
# Where addresses begin, as on a device.
_BASE = 0x7F0000000000
_HELD, _PEAK = "held at the end of a phase", "more at the peak of the phase"


@dataclass(frozen=True)
class Block:
    """Memory that is held from one operator to another.

    Attributes:
        begin: index of the operator that allocates it.
        end: index of the operator before which it is freed; as many as there are operators: never.
    """

    category: str
    bytes: int
    begin: int
    end: int


def blocks_of(held: Mapping[str, Sequence[int]]) -> list[Block]:
    """Blocks that add up to the held bytes of each category at each operator.

    What an operator adds to a category is one block. What it takes away is a block of that size, else the last ones,
    as a backward frees them.

    Args:
        held: bytes by category while each operator runs.
    """
    blocks: list[Block] = []
    for category, sizes in held.items():
        alive: list[Block] = []
        before = 0
        for index, size in enumerate(sizes):
            if size > before:
                alive.append(Block(category, size - before, index, len(sizes)))
            elif size < before:
                blocks += _freed(alive, before - size, index)
            before = size
        blocks += alive
    return sorted(blocks, key=lambda block: (block.begin, block.end))


def _freed(alive: list[Block], size: int, index: int) -> Iterator[Block]:
    """Blocks of `size` together, which are taken out of `alive`."""
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
    """The pickle of a predicted step."""
    return _pickled(timeline.held, timeline.operators, timeline.layers)


def measured_snapshot(step: MeasuredStep) -> bytes:
    """The pickle of a measured step: of each phase its peak, and what is held at its end."""
    held = [round(phase.held * _MIB) for phase in step.phases for _ in range(2)]
    peaks = [size for phase in step.phases for size in (max(0, round((phase.peak - phase.held) * _MIB)), 0)]
    names = [name for phase in step.phases for name in (f"until {phase.name}", phase.name)]
    return _pickled({_HELD: held, _PEAK: peaks}, names, [""] * len(names))


def _pickled(held: Mapping[str, Sequence[int]], operators: Sequence[str], layers: Sequence[str]) -> bytes:
    blocks = blocks_of(held)
    actions = _actions(blocks)
    addresses = _addresses(blocks, actions)
    frames = [
        [{"name": operator, "filename": layer, "line": index}]
        for index, (operator, layer) in enumerate(zip(operators, layers, strict=True))
    ]
    trace: list[dict[str, Any]] = []
    for index, is_alloc, number in actions:
        block = blocks[number]
        # What is freed has the frames of what allocated it.
        event = {
            "addr": addresses[number],
            "size": block.bytes,
            "stream": 0,
            "time_us": index,
            "frames": frames[block.begin],
            "category": block.category,
        }
        names = ("alloc",) if is_alloc else ("free_requested", "free_completed")
        trace += [{"action": name, **event} for name in names]
    snapshot = {
        "segments": _segments(blocks, addresses, frames),
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
    # As torch dumps it; the viewer's reader knows this protocol.
    return pickle.dumps(snapshot, protocol=4)


def _actions(blocks: Sequence[Block]) -> list[tuple[int, bool, int]]:
    """Index of the operator, allocates or frees, number of the block; what an operator finds is freed before."""
    end = _end(blocks)
    frees = [(block.end, False, number) for number, block in enumerate(blocks) if block.end < end]
    return sorted([*frees, *((block.begin, True, number) for number, block in enumerate(blocks))])


def _end(blocks: Sequence[Block]) -> int:
    return max((block.end for block in blocks), default=0)


def _addresses(blocks: Sequence[Block], actions: Sequence[tuple[int, bool, int]]) -> list[int]:
    """An address for each block, in the first gap that is large enough."""
    addresses, top = [0] * len(blocks), _BASE
    # Address and size, by address.
    gaps: list[tuple[int, int]] = []
    for _, is_alloc, number in actions:
        size = blocks[number].bytes
        if not is_alloc:
            _add_gap(gaps, addresses[number], size)
            continue
        place = next((place for place, (_, room) in enumerate(gaps) if room >= size), None)
        if place is None:
            addresses[number], top = top, top + size
            continue
        address, room = gaps[place]
        addresses[number] = address
        gaps[place : place + 1] = [(address + size, room - size)] if room > size else []
    return addresses


def _add_gap(gaps: list[tuple[int, int]], address: int, size: int) -> None:
    place = bisect.bisect(gaps, (address, size))
    if place < len(gaps) and gaps[place][0] == address + size:
        size += gaps.pop(place)[1]
    if place and sum(gaps[place - 1]) == address:
        address, size = gaps[place - 1][0], size + gaps.pop(place - 1)[1]
        place -= 1
    gaps.insert(place, (address, size))


def _segments(
    blocks: Sequence[Block], addresses: Sequence[int], frames: Sequence[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """One segment, with what is held at the end of the step."""
    end = _end(blocks)
    ends = (address + block.bytes for address, block in zip(addresses, blocks, strict=True))
    total = max(ends, default=_BASE) - _BASE
    found: list[dict[str, Any]] = []
    address = _BASE
    kept = sorted((number for number, block in enumerate(blocks) if block.end == end), key=addresses.__getitem__)
    for number in kept:
        block = blocks[number]
        if addresses[number] > address:
            found.append(_part(address, addresses[number] - address, "inactive", []))
        found.append(_part(addresses[number], block.bytes, "active_allocated", frames[block.begin]))
        address = addresses[number] + block.bytes
    if address < _BASE + total:
        found.append(_part(address, _BASE + total - address, "inactive", []))
    held = sum(blocks[number].bytes for number in kept)
    segment = {
        "device": 0,
        "address": _BASE,
        "total_size": total,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": found,
    }
    return [segment]


def _part(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
