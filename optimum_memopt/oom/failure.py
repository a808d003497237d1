"""What is known of a Trainer's step that ran out of memory."""

import functools
import gc
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from transformers import Trainer

from optimum_memopt.engines.api.explanations import (
    OPTIMIZER_STEP,
    ForwardCall,
    Part,
    Place,
    TensorLike,
    Tensors,
    place_of,
)
from optimum_memopt.engines.api.predictions import (
    BATCH,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    RECOMPUTED,
    SAVED,
    TEMPORARY,
)
from optimum_memopt.errors import is_out_of_memory, line_of, shortage, with_causes
from optimum_memopt.memory import malloc
from optimum_memopt.memory.peak_monitor import held_bytes, peak_bytes


@dataclass(frozen=True)
class Failure:
    """An allocation that failed, as it was found before anything was freed.

    Attributes:
        error: one line.
        place: in the step.
        held: bytes at that moment.
        requested: bytes of the allocation; None: the error does not say.
        kept: what the step has freed and a CPU's malloc has not returned, by when its error got here.
    """

    error: str
    place: Place
    held: int
    requested: int | None
    kept: int


@dataclass(frozen=True)
class Begin:
    """When a forward and backward began.

    Attributes:
        held: bytes of all that was there.
        peak: the most until then.
        has_gradients: of earlier micro-batches.
        kept: see `malloc.kept_bytes`; 0 elsewhere than on a CPU.
    """

    held: int
    peak: int
    has_gradients: bool
    kept: int

    @classmethod
    def of(cls, trainer: Trainer) -> "Begin":
        device = trainer.args.device
        # A head under `no_grad` may come first, and has none.
        has_gradients = any(parameter.grad is not None for parameter in model_of(trainer).parameters())
        return cls(held_bytes(device), peak_bytes(device), has_gradients, _kept(device))


@dataclass(frozen=True)
class Known:
    """Bytes of the tensors that were there when it began.

    Attributes:
        parameters: and buffers.
        gradients: of earlier micro-batches.
        optimizer: its states.
        batch: what the forward is given.
        outside: of all else, or what has come to it since and stays when the step's memory is free again.
    """

    parameters: int
    gradients: int
    optimizer: int
    batch: int
    outside: int

    @classmethod
    def of(cls, trainer: Trainer, begin: Begin, call: ForwardCall | None) -> "Known":
        model = model_of(trainer)
        parameters, optimizer = _bytes([*model.parameters(), *model.buffers()]), _optimizer_bytes(trainer)
        # Those of earlier micro-batches stay where they are.
        gradients = gradient_bytes(trainer) if begin.has_gradients else 0
        batch = sum(tensor.bytes for tensor in call.tensors.values()) if call is not None else 0
        outside = begin.held - parameters - optimizer - gradients - batch
        # A first forward imports and compiles.
        now = held_bytes(trainer.args.device) - parameters - optimizer - gradient_bytes(trainer) - batch
        outside = max(0, outside, now)
        return cls(parameters, gradients, optimizer, batch, outside)


def failure_of(error: Exception, trainer: Trainer, begin: Begin, place: Place | None = None) -> Failure:
    """Look at an error before anything is freed.

    Args:
        error: that memory ran out.
        trainer: whose step it was.
        begin: of the step.
        place: where that is known already.
    """
    said, device = shortage(error), trainer.args.device
    # What a backward or another runtime held is free again when its error gets here.
    highest = peak_bytes(device)
    held = said.allocated or (highest if highest > begin.peak else held_bytes(device))
    found = place or place_of(error.__traceback__, model_of(trainer))
    kept = max(0, _kept(device) - begin.kept)
    return Failure(line_of(error), found, held, said.requested, kept)


def parts_of(
    failure: Failure, trainer: Trainer, known: Known, of_graphs: Iterable[Part], first_outside: int, runtime: str
) -> tuple[Part, ...]:
    """What was held, by category.

    Args:
        failure: of the step.
        trainer: whose step it was.
        known: what was there when it began.
        of_graphs: what it had allocated; empty where that is not known.
        first_outside: bytes outside of the model before the run's first step, when a CPU's malloc had kept nothing of
            earlier steps.
        runtime: what ran the graphs, where it holds tensors of its own; empty: PyTorch.
    """
    in_optimizer = failure.place.phase == OPTIMIZER_STEP
    there = {
        PARAMETERS: known.parameters,
        GRADIENTS: gradient_bytes(trainer) if in_optimizer else known.gradients,
        OPTIMIZER: known.optimizer,
        BATCH: known.batch,
    }
    outside, found = known.outside, {part.category: part for part in of_graphs}
    rest = failure.held - sum(there.values()) - outside
    if not found:
        category = TEMPORARY if in_optimizer else SAVED
        found = {category: Part(category, max(0, rest))}
    elif (excess := sum(part.bytes for part in found.values()) - rest) > 0:
        # This step has taken again what malloc had kept.
        outside -= max(0, min(excess, outside - first_outside))
    elif runtime and excess < 0:
        part = found.get(TEMPORARY, Part(TEMPORARY, 0))
        found[TEMPORARY] = Part(TEMPORARY, part.bytes - excess, (Tensors(runtime, "", -excess), *part.tensors))
    else:
        outside += min(-excess, failure.kept)
    parts = []
    for category in (PARAMETERS, GRADIENTS, OPTIMIZER, BATCH, SAVED, RECOMPUTED, TEMPORARY):
        part = found.get(category, Part(category, 0))
        parts.append(Part(category, part.bytes + there.get(category, 0), part.tensors))
    return (*parts, Part(OTHER, outside))


def free_step(error: BaseException) -> None:
    """Give back what a failed step holds: the frames of its traceback refer to its tensors."""
    for seen in with_causes(error):
        traceback.clear_frames(seen.__traceback__)
    gc.collect()
    malloc.trim()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def forward_call(args: Any, kwargs: Any, reader: str) -> ForwardCall:
    """What a model's forward is called with, without its tensors' data."""
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
    """Of the gradients that there are."""
    return _bytes(p.grad for p in model_of(trainer).parameters() if p.grad is not None)


def _kept(device: torch.device) -> int:
    return malloc.kept_bytes() if device.type == "cpu" else 0


def _optimizer_bytes(trainer: Trainer) -> int:
    states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()
    return _bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


_FINE, _RAN_OUT, _FAILED = 0, 1, 2


class OtherRankRanOutError(Exception):
    """This rank had enough memory, another one had not; no error that code which retries would take for its own.

    Args:
        rank: the first that had not.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} ran out of memory in the forward")
        self.rank = rank


def agreeing(compute_loss: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
    """`compute_loss` that fails on all ranks when it ran out of memory on one: one small all-gather a forward.

    Raises:
        OtherRankRanOutError: from it, on ranks that had enough.
    """

    @functools.wraps(compute_loss)
    def compute_and_agree(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return compute_loss(model, *args, **kwargs)
        try:
            result = compute_loss(model, *args, **kwargs)
        except Exception as error:
            _outcomes(_RAN_OUT if is_out_of_memory(error) else _FAILED, trainer.args.device)
            raise
        outcomes = _outcomes(_FINE, trainer.args.device)
        # A rank that failed in another way ends the run by itself.
        if _RAN_OUT in outcomes and _FAILED not in outcomes:
            raise OtherRankRanOutError(outcomes.index(_RAN_OUT))
        return result

    return compute_and_agree


def _outcomes(own: int, device: torch.device) -> list[int]:
    gathered = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, torch.tensor([own], dtype=torch.int32, device=device))
    return [int(outcome) for outcome in gathered]
