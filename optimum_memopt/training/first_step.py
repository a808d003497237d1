"""Runs a first step again as plain PyTorch, where its compiled backward fails."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.engines.base import Engine
from optimum_memopt.training.replan import StepState, modules_beside
from optimum_memopt.training.step_failure import free_step, model_of

# Quantized weights may be buffers (GPTQ): a copy of them for the whole of a step would be in its peak.
_MOST_BUFFERS = 64 * 2**20


def falling_back(trainer: Trainer, engine: Engine) -> Callable[..., torch.Tensor]:
    """The Trainer's `training_step`, which goes on without a plan where the first one's backward cannot run.

    The model's forward is the engine's: what fails there never gets here. With several processes the error is left
    alone, since DDP's other ranks wait in the backward's all-reduce.

    Args:
        trainer: whose model it trains.
        engine: that trains it.
    """
    training_step = trainer.training_step

    @functools.wraps(training_step)
    def step(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_first = engine.plans() is None and trainer.args.world_size == 1
        if not is_first or sum(buffer.nbytes for buffer in model_of(trainer).buffers()) > _MOST_BUFFERS:
            return training_step(model, inputs, *args, **kwargs)
        before = StepState.of(trainer, modules_beside(trainer))
        try:
            # A copy, since label smoothing takes the labels out.
            return training_step(model, copy.copy(inputs), *args, **kwargs)
        except Exception as error:
            plain = engine.without_plan(error)
            if plain is None or before.restore(model_of(trainer)):
                raise
            free_step(error)
        with plain:
            return training_step(model, inputs, *args, **kwargs)

    return step
