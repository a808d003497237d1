"""The history that CUDA's caching allocator records (torch 2.9 to 2.15: `torch.cuda.memory._record_memory_history`).

It is one for the process: where the user records it, or where torch has another allocator, none is recorded here. One
that the user has started meanwhile is told by its frames, and goes on.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

# More than a loss has; where there are more, the first ones are gone.
_MOST_ENTRIES = 100_000


class Taken(NamedTuple):
    """Bytes that were allocated while a history was recorded.

    Attributes:
        most: that were held at once.
        left: that still are, less what was freed of the memory that was given.
    """

    most: int
    left: int


def start_history(device: torch.device) -> bool:
    """Record what is allocated from now on; False where that is not possible."""
    is_possible = (
        device.type == "cuda"
        and torch.cuda.get_allocator_backend() == "native"
        and not torch._C._cuda_isHistoryEnabled()
    )
    if is_possible:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_ENTRIES)
    return is_possible


def stop_history(device: torch.device, given: Collection[int]) -> Taken | None:
    """Stop the history; None where not all of it was kept, or where the user has stopped it, or started another one.
    Arguments as of `taken`."""
    if not torch._C._cuda_isHistoryEnabled():
        return None
    is_own = True
    try:
        entries = torch.cuda.memory._snapshot()["device_traces"][device.index]
        is_own = not any(entry.get("frames") for entry in entries)
    finally:
        if is_own:
            torch.cuda.memory._record_memory_history(None)
    return taken(entries, given) if is_own and len(entries) < _MOST_ENTRIES else None


def taken(entries: Iterable[Mapping[str, Any]], given: Collection[int]) -> Taken:
    """Returns what was taken in a history with these entries.

    Args:
        given: addresses of memory that was there before, and counts as freed where it was. Other memory that was there
            does not count.
    """
    sizes: dict[int, int] = {}
    held = most = 0
    for entry in entries:
        address, action = entry.get("addr", 0), entry["action"]
        if action == "alloc":
            sizes[address] = entry["size"]
            held += entry["size"]
            most = max(most, held)
        elif action == "free_requested":
            own = sizes.pop(address, None)
            held -= own if own is not None else entry["size"] if address in given else 0
    return Taken(most, held)
