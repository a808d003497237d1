"""Reads on the host whether an attention mask marks padding, before accelerate moves it to the device.

A forward runs without a mask that marks no padding (`attention.py`). To read masks on the device, each forward would
wait for it, while the device is idle. accelerate's data loaders, including Trainer's, move batches by one function of
their file (`accelerate/data_loader.py`, 1.3 to 1.15).
"""

import functools
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from optimum_memopt.compat.torch import writes_to
from optimum_memopt.compat.transformers import is_mask
from optimum_memopt.engines.torch_compat.fake_tensors import is_known_true
from optimum_memopt.engines.torch_compat.patches import Name, Patch

_FILE, _MOVES = "accelerate.data_loader", "send_to_device"
MOVED = Patch(
    "padding of batches moved by data loaders",
    "each step waits for the device to read its attention mask",
    "accelerate",
    since="1.3",
    tested="1.3 to 1.15",
    names=(Name(_FILE, _MOVES, ("tensor", "device")),),
)
# An attribute of a mask on the device: whether all its elements are true, and the tensor version that was read.
_KNOWN = "_memopt_is_true"


def is_true(mask: torch.Tensor) -> bool:
    """True if a mask marks no padding; waits for the device unless this was read on the host."""
    known: tuple[bool, int] | None = getattr(mask, _KNOWN, None)
    return known[0] if known is not None and known[1] == writes_to(mask) else is_known_true(mask)


def note(batch: Any, moved: Any) -> None:
    """Record on each moved mask whether its copy on the host is all true."""
    if not isinstance(batch, Mapping) or not isinstance(moved, Mapping):
        return
    for name, mask in batch.items():
        on_device = moved.get(name)
        if not is_mask(name) or not _is_on_host(mask) or on_device is mask:
            continue
        # An inference tensor has no version, and is not for training.
        if isinstance(on_device, torch.Tensor) and not on_device.is_inference():
            setattr(on_device, _KNOWN, (is_known_true(mask), writes_to(on_device)))


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


class _Watch:
    """Wraps accelerate's function while an engine on a device is attached."""

    def __init__(self) -> None:
        self._lock, self._wanted = threading.Lock(), 0
        self._stock: Callable[..., Any] | None = None
        self._noting: Callable[..., Any] | None = None

    def start(self) -> None:
        with self._lock:
            self._wanted += 1
            if self._wanted == 1 and MOVED.applies:
                file: Any = importlib.import_module(_FILE)
                self._stock = getattr(file, _MOVES)
                self._noting = self._around(self._stock)
                setattr(file, _MOVES, self._noting)

    def stop(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0 and self._noting is not None:
                file: Any = importlib.import_module(_FILE)
                # If other code has wrapped it since, it stays inside that wrapper, and records nothing.
                if getattr(file, _MOVES) is self._noting:
                    setattr(file, _MOVES, self._stock)
                self._stock = self._noting = None

    def _around(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            moved = stock(tensor, *args, **kwargs)
            if self._noting is not None:
                note(tensor, moved)
            return moved

        return move


_watch = _Watch()
watch_masks, leave_masks = _watch.start, _watch.stop
