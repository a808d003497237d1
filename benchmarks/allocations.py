"""Bytes that torch's allocator gives out, for benchmarks and tests."""

import gc
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated(function: Callable[[], Any]) -> tuple[int, int, Any]:
    """The most that a call held over what was there before, what it left, in bytes, and its result."""
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = function()
    finally:
        gc.enable()
    events = seen.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, size in changes:
        held += size
        peak = max(peak, held)
    return peak, held, result
