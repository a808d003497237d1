"""The history that CUDA's caching allocator records (torch 2.9 to 2.15: `torch.cuda.memory._record_memory_history`).

A process has one history. This module records none while the user records it, or if torch uses another allocator.
Entries with frames belong to a history that the user has started since, which is left running.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

# More entries than a loss needs; beyond this number the first ones are lost.
_MOST_ENTRIES = 100_000


class Taken(NamedTuple):
    """Bytes that were allocated while a history was recorded.

    Attributes:
        most: the peak of bytes allocated at once.
        left: the bytes still allocated at the end, less the frees of `given` memory (see `taken`).
    """

    most: int
    left: int


def start_history(device: torch.device) -> bool:
    """Start to record allocations. Returns False if that is not possible."""
    is_possible = (
        device.type == "cuda"
        and torch.cuda.get_allocator_backend() == "native"
        and not torch._C._cuda_isHistoryEnabled()
    )
    if is_possible:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=_MOST_ENTRIES)
    return is_possible


def stop_history(device: torch.device, given: Collection[int]) -> Taken | None:
    """Stop the history, and return the bytes allocated in it.

    None if entries were lost, or the user has stopped the history or started another one.

    Args:
        device: the CUDA device.
        given: see `taken`.
    """
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
    """Returns the bytes that were allocated in a history.

    Args:
        entries: the history's entries.
        given: addresses of earlier allocations whose frees count; frees of other earlier allocations do not.
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
