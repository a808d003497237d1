"""Measures the bytes that torch's allocator hands out, for benchmarks and tests."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def allocated(function: Callable[[], Any]) -> tuple[int, int, Any]:
    """Returns a call's peak over what was allocated before, the bytes it leaves allocated, and its result."""
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


class TensorCounter(TorchDispatchMode):
    """Counts the bytes of live tensors that calls create, without operators' internal workspaces.

    For processes in which gloo's threads copy the data that they send: a profiler sees some of those copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, int] = {}
        self._held = self._peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def allocated(self, function: Callable[[], Any]) -> tuple[int, int, Any]:
        """Measure a call as `allocated` does; its tensors count until they are freed, in later calls too."""
        before = self._peak = self._held
        with self:
            result = function()
        return self._peak - before, self._held - before, result

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        results = function(*args, **(kwargs or {}))
        for storage in _storages(results):
            if (key := storage._cdata) not in given and key not in self._living:
                self._living[key] = storage.nbytes()
                self._held += storage.nbytes()
                weakref.finalize(storage, self._free, key)
        self._peak = max(self._peak, self._held)
        return results

    def _free(self, key: int) -> None:
        self._held -= self._living.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = (each for each in tree_leaves(values) if type(each) in (torch.Tensor, torch.nn.Parameter))
    return [tensor.untyped_storage() for tensor in tensors]
