"""Runs a step that ran out of memory again, under a plan that fits, as if it had not run before."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import Trainer

from optimum_memopt import compat
from optimum_memopt.engines.base import Engine, Selection
from optimum_memopt.engines.forward_state import ForwardState
from optimum_memopt.engines.memory_report import FORWARD, OPTIMIZER_STEP
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import log_from_any_rank
from optimum_memopt.sizes import Budget, gib_text
from optimum_memopt.training.step_failure import Failure, model_of

_MOST = 3
# Of what was held when an allocation failed, and of the last budget: what a step holds is predicted, not known.
_ROOM = 0.03


@dataclass(frozen=True)
class StepState:
    """What a forward and backward change: random generators, buffers, gradients.

    Attributes:
        forward: generators and buffers.
        gradients: of earlier micro-batches, each with the number of writes to it.
    """

    forward: ForwardState
    gradients: Mapping[torch.nn.Parameter, tuple[torch.Tensor, int]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> "StepState":
        gradients = {
            parameter: (parameter.grad, compat.writes_to(parameter.grad))
            for parameter in model.parameters()
            if parameter.grad is not None
        }
        return cls(ForwardState.of(model, with_buffers=True), gradients)

    def restore(self, model: torch.nn.Module) -> bool:
        """As it was; False: gradients of earlier micro-batches have been added to."""
        for parameter in model.parameters():
            before = self.gradients.get(parameter)
            if before is None:
                parameter.grad = None
            elif parameter.grad is not before[0] or compat.writes_to(before[0]) != before[1]:
                return False
        self.forward.restore(model)
        return True


class Replanner:
    """Has an engine plan for less each time that a step runs out of memory.

    Args:
        engine: that plans within a budget.
        trainer: that it trains in.

    Raises:
        MemOptError: under DeepSpeed, where ranks have exchanged gradients before one of them knows.
    """

    def __init__(self, engine: Engine, trainer: Trainer) -> None:
        if trainer.args.deepspeed is not None:
            raise MemOptError(
                "--memory_opt_on_oom replan with DeepSpeed: its ranks exchange gradients in the backward; leave it out"
            )
        self._engine = engine
        self._world_size = trainer.args.world_size
        self._budget: int | None = None
        self._times = 0

    def begin(self) -> None:
        """A run begins."""
        self._times = 0

    @property
    def has_replanned(self) -> bool:
        """In this run."""
        return self._times > 0

    def replan(self, failure: Failure, is_own: bool, before: StepState, trainer: Trainer) -> bool:
        """Choose a plan for less memory and restore what the step has changed; False: it cannot be run again.

        Args:
            failure: of the step, whose memory is free again.
            is_own: this rank ran out; else another one did, and this one runs the step again under the same plan.
            before: the step.
            trainer: whose step it is.
        """
        step = f"step {trainer.state.global_step + 1} ran out of memory"
        why = self._refused(failure)
        if not why and not before.restore(model_of(trainer)):
            why = "its backward had begun to add to the gradients of earlier micro-batches"
        if why:
            log_from_any_rank(f"{step} and is not run again: {why}")
            return False
        self._times += 1
        if not is_own:
            return True
        self._budget = int(min(failure.held, self._budget or failure.held) * (1 - _ROOM))
        log_from_any_rank(
            f"{step} in its {failure.place.phase} with {gib_text(failure.held)} held: planning for "
            f"{gib_text(self._budget)} and running it again ({self._times} of {_MOST})"
        )
        self._engine.apply(Selection(budget=Budget(gib_text(self._budget).replace(" ", ""), self._budget)))
        return True

    def _refused(self, failure: Failure) -> str:
        if failure.place.phase == OPTIMIZER_STEP:
            return "no plan makes the optimizer's states smaller"
        if self._times == _MOST:
            return f"that was tried {_MOST} times"
        if self._world_size > 1 and failure.place.phase != FORWARD:
            return "the other ranks wait in the backward's all-reduce, so all ranks stop"
        return ""
