"""Steps that run out of memory: by a limit on torch's tensors, by an error at a chosen call, and for real."""

import itertools
import multiprocessing
import re
import resource
import weakref
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimum_memopt import MemOptTrainer


class LimitedTensors(TorchDispatchMode):
    """Raises torch's own error when the tensors created within it would take more than `limit` bytes.

    Attributes:
        live: bytes of these tensors now.
        peak: most bytes so far.
        requested: bytes of the refused allocation.
        at_failure: bytes of these tensors at the refused allocation.
    """

    def __init__(self, limit: int = 2**62) -> None:
        super().__init__()
        self.limit = limit
        self.live = self.peak = self.requested = self.at_failure = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if self.live + size > self.limit:
            self.requested, self.at_failure = size, self.live
            raise torch.OutOfMemoryError(f"out of memory. Tried to allocate {size} bytes.")
        key = storage._cdata
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class RunsOut(MemOptTrainer):
    """Runs out of memory at chosen training forwards, counted from 1; a repeated step counts again.

    Attributes:
        fails: place of the failure, `forward` or `backward`, by forward.
        held: returns the bytes that the error reports as allocated, called when it is raised; None: not reported.
        forwards: number of forwards so far, repeated ones included.
        raised: the errors.
        losses: losses recorded in each step, as another project's Trainer records its metrics.
    """

    def __init__(
        self, *args: Any, fails: dict[int, str], held: Callable[[Any], int] | None = None, **kwargs: Any
    ) -> None:
        self.fails, self.held, self.forwards = fails, held, 0
        # Neither is a container whose contents a repeated step restores.
        self._numbers, self.raised = itertools.count(1), UserList[BaseException]()
        self.losses: dict[str, list[torch.Tensor]] = {"train": []}
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        if not model.training:
            return loss
        self.losses["train"].append(loss.detach())
        where = self.count()
        if where == "forward":
            self._run_out()
        if where == "backward":
            loss.register_hook(lambda gradient: self._run_out())
        return loss

    def count(self) -> str:
        """Count a forward; returns where it runs out of memory, or an empty string."""
        self.forwards = next(self._numbers)
        return self.fails.get(self.forwards, "")

    def _run_out(self) -> None:
        allocated = f" Of the allocated memory {self.held(self)} bytes is allocated by PyTorch" if self.held else ""
        error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 2.00 MiB.{allocated}")
        self.raised.append(error)
        raise error


def data_bytes() -> int:
    """Returns the bytes that count towards a limit on this process's data."""
    return int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def limit_data(extra: int) -> None:
    """Limit this process to `extra` bytes more than it has now."""
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + extra, resource.RLIM_INFINITY))


def in_fresh_process(target: Callable[..., None], *args: Any) -> int:
    """Run a function in a process that has imported its test module and trained nothing; returns the exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, target.__module__])
    process = context.Process(target=target, args=args)
    process.start()
    process.join(600)
    assert process.exitcode is not None
    return process.exitcode
