"""A step as a memory snapshot, read as PyTorch's own tools read it."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.cuda import _memory_viz as viewer

from optimum_memopt.report.snapshot import blocks_of, measured_snapshot, predicted_snapshot
from tests.unit.made import FULL, MIB, timeline

LARGE = timeline(layers=8, per_layer=20)


def replayed(snapshot: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Index of the operator and bytes after each event; addresses do not overlap."""
    alive: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(address + size <= other or other + alive[other] <= address for other in alive)
            alive[address] = size
        elif event["action"] == "free_completed":
            assert alive.pop(address) == size
        yield event["time_us"], sum(alive.values())


@pytest.mark.parametrize("step", [FULL.timeline, LARGE], ids=["small", "large"])
def test_the_trace_holds_what_the_timeline_holds(step):
    snapshot = pickle.loads(predicted_snapshot(step))
    held = dict(replayed(snapshot))
    now = 0
    for index, total in enumerate(step.total):
        now = held.get(index, now)
        assert now == total
    (segment,) = snapshot["segments"]
    assert segment["allocated_size"] == step.total[-1]
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] >= step.peak
    events = snapshot["device_traces"][0]
    saved = [event for event in events if event["category"] == "saved activations" and event["action"] == "alloc"]
    assert [event["frames"][0]["name"] for event in saved] == list(step.operators[: step.backward_at])
    assert saved[0]["frames"][0]["filename"] == step.layers[0]


def test_a_measured_step_has_its_phases():
    held = dict(replayed(pickle.loads(measured_snapshot(FULL.measured))))
    assert held[0] == round(199.5 * MIB) and max(held.values()) == 204 * MIB
    assert list(held.values())[-1] == 200 * MIB


@pytest.mark.parametrize("show", [viewer.trace_plot, viewer.segment_plot, viewer.trace, viewer.segsum])
def test_pytorchs_tools_take_it(show):
    for data in (predicted_snapshot(FULL.timeline), measured_snapshot(FULL.measured)):
        assert show(pickle.loads(data))


def test_a_block_is_freed_whole_where_its_size_is_the_difference():
    freed = [block for block in blocks_of({"saved": (10, 30, 60, 40, 0)}) if block.end == 3]
    assert [(block.begin, block.bytes) for block in freed] == [(1, 20)]
    split = blocks_of({"saved": (10, 30, 25, 25)})
    assert [(block.begin, block.end, block.bytes) for block in split] == [(0, 4, 10), (1, 2, 5), (1, 4, 15)]
