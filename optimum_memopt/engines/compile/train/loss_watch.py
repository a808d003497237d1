"""Measures the memory that a training loop allocates between a forward and its backward, as for its own loss.

A loss computed from logits may take several times their memory. On CUDA it is read from the allocator's history of the
first steps, for which no step waits. Before the first step, a loop that passes no labels to the model is assumed to
compute a cross entropy: log-probabilities and their gradient, in float32. With several forwards before one backward,
the memory that losses of the earlier ones leave is held throughout the step.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from optimum_memopt.compat.torch import current_autocast
from optimum_memopt.engines.torch_compat.allocation_history import Taken, start_history, stop_history
from optimum_memopt.engines.torch_compat.dynamo import StorageWeakRef, storage_id
from optimum_memopt.logs import best_effort

# The most histories that are read in a backward, and that are started: some reach no backward.
_MOST_READINGS, _MOST_STARTS = 2, 12
# The least memory that counts as a loss, as a share of the outputs.
_LEAST = 0.01
_WHAT = "what the training loop takes between forward and backward"


class WatchedStorage(NamedTuple):
    """The storage of an output. The storage is watched, since a loop may keep only a detached view of the output."""

    number: int
    bytes: int
    ref: StorageWeakRef

    @property
    def is_alive(self) -> bool:
        return not self.ref.expired()


class _Recording(NamedTuple):
    """A forward after which the allocator's history is recorded: its outputs and their addresses."""

    device: torch.device
    outputs: list[WatchedStorage]
    addresses: frozenset[int]


class LossWatch:
    """Reads the memory of a training loop between a forward and its backward from CUDA's allocator history.

    Args:
        assumed: value of `most` until a step has been measured.

    Attributes:
        most: peak of the loop's memory, in multiples of the outputs' bytes.
        left: memory held when the model's backward begins, without the gradients passed to it; in the same unit.
        earlier: bytes that losses of earlier forwards of a step leave.
        is_assumed: no step has been measured yet.
    """

    def __init__(self, assumed: float = 0.0) -> None:
        self.most, self.left, self.earlier, self.is_assumed = assumed, 0.0, 0, True
        self._readings = self._starts = 0
        self._recording: _Recording | None = None
        # Bytes left by the losses of earlier forwards of the current step.
        self._earlier = 0

    @property
    def is_read(self) -> bool:
        """True if no further step is watched."""
        return self._readings >= _MOST_READINGS or self._starts >= _MOST_STARTS

    def begin(self, outputs: Sequence[torch.Tensor]) -> None:
        """Start to record, after a forward has returned these outputs to the loop."""
        self.stop()
        if outputs and not self.is_read:
            with best_effort(_WHAT):
                if start_history(device := outputs[0].device):
                    self._starts += 1
                    addresses = frozenset(each.untyped_storage().data_ptr() for each in outputs)
                    self._recording = _Recording(device, storages_of(outputs), addresses)

    def pass_on(self) -> None:
        """Count what the last loss has left, when another forward may begin before the backward."""
        if (taken := self.stop()) is not None:
            self._earlier += max(0, taken.left)

    def end(self, gradients: Sequence[torch.Tensor]) -> None:
        """Read the history when the model's backward begins with these gradients."""
        recording, earlier, self._earlier = self._recording, self._earlier, 0
        if (taken := self.stop()) is None or recording is None:
            return
        self._readings += 1
        size, given = bytes_of(recording.outputs), bytes_of(storages_of(gradients))
        most, left = _share(taken.most, size), _share(taken.left - given, size)
        if not self.is_assumed:
            most, left, earlier = max(most, self.most), max(left, self.left), max(earlier, self.earlier)
        self.most, self.left, self.earlier, self.is_assumed = most, left, earlier, False

    def stop(self) -> Taken | None:
        """Stop the history. Returns the memory that the loop has allocated beside the outputs; None if no history, or
        only a part of one, was recorded."""
        recording, self._recording = self._recording, None
        taken = None
        if recording is not None:
            with best_effort(_WHAT):
                taken = stop_history(recording.device, recording.addresses)
        if recording is None or taken is None:
            return None
        # Freed outputs must not reduce the memory of the loop.
        dropped = bytes_of(each for each in recording.outputs if not each.is_alive)
        return taken._replace(left=taken.left + dropped)


def assumed_loss(model: torch.nn.Module, inputs: Mapping[str, object]) -> float:
    """Returns the assumed value of `LossWatch.most` after a forward with these inputs."""
    parameter = next(model.parameters())
    if parameter.device.type != "cuda" or any("label" in name for name in inputs):
        return 0.0
    dtype = current_autocast("cuda") or parameter.dtype
    return 2 * torch.float32.itemsize / dtype.itemsize


def storages_of(tensors: Sequence[torch.Tensor]) -> list[WatchedStorage]:
    """Returns the distinct storages of tensors."""
    found = {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}
    return [WatchedStorage(number, each.nbytes(), StorageWeakRef(each)) for number, each in found.items()]


def bytes_of(storages: Iterable[WatchedStorage]) -> int:
    return sum(each.bytes for each in storages)


def _share(size: int, whole: int) -> float:
    share = round(size / whole, 3) if whole else 0.0
    return share if share >= _LEAST else 0.0
