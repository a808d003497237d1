"""A step that ran out of memory, as it is found before anything is freed."""

import gc
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.engines.api.explanations import Failure, ForwardCall, Place, TensorLike, place_of
from optimum_memopt.engines.api.predictions import BATCH, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS
from optimum_memopt.errors import line_of, shortage, with_causes
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import held_bytes, peak_bytes


@dataclass(frozen=True)
class StepStart:
    """The memory of the process when a forward and backward began, in bytes.

    Attributes:
        peak: the most until then.
        has_gradients: of earlier micro-batches.
        kept: see `malloc.kept_bytes`; 0 elsewhere than on a CPU.
    """

    held: int
    peak: int
    has_gradients: bool
    kept: int

    @classmethod
    def of(cls, trainer: Trainer) -> "StepStart":
        device = trainer.args.device
        # A head under `no_grad` may come first, and has none.
        has_gradients = any(parameter.grad is not None for parameter in model_of(trainer).parameters())
        return cls(held_bytes(device), peak_bytes(device), has_gradients, _kept(device))


def held_at_start(trainer: Trainer, start: StepStart, call: ForwardCall | None) -> dict[str, int]:
    """Bytes of what was there when a forward and backward began, by category.

    `OTHER` belongs to no tensor of the model, optimizer or batch. Where more of it is there when the step's memory is
    free again, it counts as there before.
    """
    model = model_of(trainer)
    parameters = _bytes([*model.parameters(), *model.buffers()])
    states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()
    optimizer = _bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    batch = sum(tensor.bytes for tensor in call.tensors.values()) if call is not None else 0
    tensors, gradients = parameters + optimizer + batch, gradient_bytes(trainer)
    # Those of earlier micro-batches stay where they are.
    accumulated = gradients if start.has_gradients else 0
    # A first forward imports and compiles.
    now = held_bytes(trainer.args.device) - tensors - gradients
    other = max(0, start.held - tensors - accumulated, now)
    return {PARAMETERS: parameters, GRADIENTS: accumulated, OPTIMIZER: optimizer, BATCH: batch, OTHER: other}


def failure_of(error: Exception, trainer: Trainer, start: StepStart, place: Place | None = None) -> Failure:
    """The failure that an error tells of, read before anything is freed; `place`: where that is known already."""
    said, device = shortage(error), trainer.args.device
    # What a backward or another runtime held is free again when its error gets here.
    highest = peak_bytes(device)
    held = said.allocated or (highest if highest > start.peak else held_bytes(device))
    place = place or place_of(error.__traceback__, model_of(trainer))
    return Failure(line_of(error), place, held, said.requested, max(0, _kept(device) - start.kept))


def free_step(error: BaseException) -> None:
    """Release what a failed step holds: the frames of its traceback refer to its tensors."""
    for seen in with_causes(error):
        traceback.clear_frames(seen.__traceback__)
    gc.collect()
    malloc.trim()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forward_call(args: Any, kwargs: Any, reader: str) -> ForwardCall:
    """The arguments of a model's forward, without its tensors' data."""
    return ForwardCall(_alike(args), _alike(kwargs), reader)


def _alike(given: Any) -> Any:
    """With `TensorLike` for tensors, in containers too."""
    if isinstance(given, torch.Tensor):
        return TensorLike.of(given)
    if isinstance(given, Mapping):
        return {key: _alike(value) for key, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)(map(_alike, given))
    return given


def model_of(trainer: Trainer) -> torch.nn.Module:
    """The model without wrappers."""
    model = trainer.model
    assert isinstance(model, torch.nn.Module)
    return model


def gradient_bytes(trainer: Trainer) -> int:
    return _bytes(p.grad for p in model_of(trainer).parameters() if p.grad is not None)


def _kept(device: torch.device) -> int:
    return malloc.kept_bytes() if device.type == "cpu" else 0


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
