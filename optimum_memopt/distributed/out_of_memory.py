"""All ranks learn whether one of them ran out of memory in its forward, before the backward exchanges gradients."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from transformers import Trainer

from optimum_memopt.memory.out_of_memory import is_out_of_memory

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
