"""The ways to train a model side by side, for a terminal and for JSON. Pure."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from optimum_memopt.engines.api.predictions import StepTimeline, Way
from optimum_memopt.sizes import gib_text

# Groups of tensors that are shown of each category, and bytes of the smallest.
_GROUPS, _SHOWN = 3, 2**20


def to_text(ways: Sequence[Way], header: str) -> str:
    """A table with a row for each way, and what the first one holds at its peak."""
    has_reserved = any(way.reserved is not None for way in ways)
    has_time = any(way.seconds is not None for way in ways)
    rows = [
        {
            "way to train": way.plan.name,
            "loss": "chunked" if way.plan.chunks_loss else "plain",
            "predicted peak": "-" if way.note else gib_text(way.peak),
            **({"reserved": "-" if way.reserved is None else gib_text(way.reserved)} if has_reserved else {}),
            **({"time": "-" if way.seconds is None else f"{1000 * way.seconds:.0f} ms"} if has_time else {}),
            "flags": " ".join(way.plan.flags) or "-",
        }
        for way in ways
    ]
    grid = tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)
    notes = [f"{way.plan.name}: {way.note}" for way in ways if way.note]
    first = ways[0]
    held = () if first.timeline is None else ("", held_at_peak(first.plan.name, first.timeline))
    return "\n".join((header, grid, *notes, *held))


def held_at_peak(name: str, timeline: StepTimeline) -> str:
    """The largest groups of tensors at the peak of what has this name."""
    layer = timeline.layers[timeline.peak_at]
    where = f"in the {timeline.peak_phase}, at {timeline.operators[timeline.peak_at]}{f' of {layer}' if layer else ''}"
    rows = []
    for category in dict.fromkeys(group.category for group in timeline.alive):
        groups = [group for group in timeline.alive if group.category == category]
        named = (f"{group.name} {gib_text(group.bytes)}" for group in groups if group.name and group.bytes >= _SHOWN)
        if (total := sum(group.bytes for group in groups)) >= _SHOWN:
            rows.append((total, category, gib_text(total), ", ".join(itertools.islice(named, _GROUPS))))
    rows.sort(key=operator.itemgetter(0), reverse=True)
    grid = tabulate([row for _, *row in rows], tablefmt="plain", disable_numparse=True)
    return "\n".join((f"{name} holds at its peak, {where}:", grid))


def to_dict(ways: Sequence[Way]) -> list[dict[str, Any]]:
    """For JSON; bytes and seconds."""
    return [
        {
            "name": way.plan.name,
            "chunked_loss": way.plan.chunks_loss,
            "peak": way.peak or None,
            "reserved": way.reserved,
            "seconds": way.seconds,
            "flags": list(way.plan.flags),
            "note": way.note,
        }
        for way in ways
    ]
