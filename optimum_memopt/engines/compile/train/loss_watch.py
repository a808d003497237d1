"""Finds out what a training loop allocates between a forward and its backward, as for a loss of its own.

A loss that is computed from logits may take several times as much as these. On CUDA the allocator's history of the
first steps tells, which no step waits for. Before the first one, a loop whose model is given no labels is taken to
compute a cross entropy: log-probabilities and their gradient, in float32.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from optimum_memopt.engines.compile.torch_compat.allocation_history import start_history, stop_history
from optimum_memopt.engines.compile.torch_compat.dynamo import StorageWeakRef, storage_id
from optimum_memopt.logs import best_effort

# Steps whose history is recorded: what the first one allocates once does not count from the second on.
_MOST_READINGS = 2
# As a share of the outputs; what is less is no loss.
_LEAST = 0.01
_FLOAT32 = 4
_WHAT = "what the training loop takes between forward and backward"


class WatchedStorage(NamedTuple):
    """The storage of an output: a loop may keep a detached view of it alone."""

    number: int
    bytes: int
    address: int
    device: torch.device
    ref: StorageWeakRef

    @property
    def is_alive(self) -> bool:
        return not self.ref.expired()


class LossWatch:
    """What a training loop allocates between forwards and backwards.

    Args:
        assumed: `most`, until a step has shown it.

    Attributes:
        most: at once, in multiples of the outputs' bytes.
        left: when the model's backward begins, beside the gradients that it is given; in the same unit.
    """

    def __init__(self, assumed: float = 0.0) -> None:
        self.most, self.left = assumed, 0.0
        self._readings = 0
        # Of the forward whose history is recorded.
        self._outputs: list[WatchedStorage] = []

    @property
    def is_read(self) -> bool:
        """True where no further step is watched."""
        return self._readings >= _MOST_READINGS

    def begin(self, outputs: list[WatchedStorage]) -> None:
        """The loop has got these outputs."""
        self.cancel()
        if outputs and not self.is_read:
            with best_effort(_WHAT):
                self._outputs = outputs if start_history(outputs[0].device) else []

    def end(self, gradients: Sequence[torch.Tensor]) -> None:
        """The model's backward begins with these."""
        outputs, self._outputs = self._outputs, []
        if not outputs:
            return
        self._readings += 1
        with best_effort(_WHAT):
            taken = stop_history(outputs[0].device, {each.address for each in outputs})
            if taken is not None:
                size = sum(each.bytes for each in outputs)
                dropped = sum(each.bytes for each in outputs if not each.is_alive)
                given = sum(each.bytes for each in storages_of(gradients))
                self.most = _share(taken.most, size)
                self.left = _share(taken.left + dropped - given, size)

    def cancel(self) -> None:
        """The backward did not follow the forward."""
        if self._outputs:
            device, self._outputs = self._outputs[0].device, []
            with best_effort(_WHAT):
                stop_history(device, ())


def assumed_loss(model: torch.nn.Module, inputs: Mapping[str, object]) -> float:
    """Returns the loss that a loop is taken to compute of a forward with these inputs, as `LossWatch.most`."""
    parameter = next(model.parameters())
    if parameter.device.type != "cuda" or any("label" in name for name in inputs):
        return 0.0
    is_autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if is_autocast else parameter.dtype
    return 2 * _FLOAT32 / dtype.itemsize


def storages_of(tensors: Sequence[torch.Tensor]) -> list[WatchedStorage]:
    """Returns the storages of tensors, each once."""
    found = {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}
    return [
        WatchedStorage(number, each.nbytes(), each.data_ptr(), each.device, StorageWeakRef(each))
        for number, each in found.items()
    ]


def _share(size: int, whole: int) -> float:
    share = round(size / whole, 3) if whole else 0.0
    return share if share >= _LEAST else 0.0
