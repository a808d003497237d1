"""Reruns a step that ran out of memory under a plan that fits, with its state restored."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from optimum_memopt.compat.torch import accumulation_hooks, writes_to
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.explanations import FORWARD, OPTIMIZER_STEP, Failure
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.forward_patch import ForwardState
from optimum_memopt.engines.shared.function_state import refill
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import log_from_any_rank
from optimum_memopt.oom.report import free_step, model_of
from optimum_memopt.sizes import Budget, gib_text
from optimum_memopt.trainer_patches import innermost
from optimum_memopt.training.fake_run import held_by

_MOST = 3
# Share by which a new budget stays below the memory held at the failure and below the last budget, since the memory of
# a step is predicted.
_ROOM = 0.03


@dataclass(frozen=True)
class StepState:
    """The state that a step changes: random generators, buffers, gradients, and the state of a Trainer's loss.

    Attributes:
        forward: the state that a forward changes.
        parameters: each parameter with the number of writes to it.
        gradients: the gradient of each parameter that had one, with the number of writes to it.
        values: copies of the gradients of parameters outside of the model: Trainer never sets these to zero
            (transformers 5.23), so they exist before most steps.
    """

    forward: ForwardState
    parameters: Mapping[torch.Tensor, int]
    gradients: Mapping[torch.Tensor, tuple[torch.Tensor, int]]
    values: Mapping[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, trainer: Trainer, on_host: bool) -> "StepState":
        """Returns the state before a step; `on_host` as in `ForwardState.of`."""
        model, modules = model_of(trainer), modules_beside(trainer)
        of_model = dict.fromkeys(model.parameters())
        beside = dict.fromkeys([*(p for module in modules for p in module.parameters()), *_trained(trainer)])
        gradients = {p: p.grad for p in (of_model | beside) if p.grad is not None}
        losses = filter(None, (innermost(trainer, "compute_loss"), trainer.compute_loss_func))
        return cls(
            ForwardState.of(model, with_buffers=True, others=modules, on_host=on_host, functions=losses),
            {parameter: writes_to(parameter) for parameter in of_model | beside},
            {parameter: (gradient, writes_to(gradient)) for parameter, gradient in gradients.items()},
            {p: gradient.detach().clone() for p, gradient in gradients.items() if p not in of_model},
        )

    def restore(self) -> str:
        """Restore the state; returns why it cannot be restored, else an empty text."""
        if _steps_in_backward(self.parameters) or any(writes_to(p) != n for p, n in self.parameters.items()):
            return "its backward had begun to change parameters"
        for parameter, (gradient, writes) in self.gradients.items():
            is_as_before = parameter.grad is gradient and writes_to(gradient) == writes
            if not is_as_before and parameter not in self.values:
                return "its backward had begun to add to the gradients of earlier micro-batches"
        for parameter in self.parameters:
            parameter.grad = self.gradients[parameter][0] if parameter in self.gradients else None
        for parameter, values in self.values.items():
            self.gradients[parameter][0].detach().copy_(values)
        self.forward.restore()
        return ""


class Replanner:
    """Makes an engine plan for less memory each time a step runs out of memory.

    Attributes:
        times: number of reruns in this training run.
    """

    def __init__(self, engine: Engine, trainer: Trainer) -> None:
        if trainer.args.deepspeed is not None:
            raise MemOptError(
                "--memory_opt_on_oom replan with DeepSpeed: its ranks exchange gradients in the backward; leave it out"
            )
        if trainer.is_fsdp_enabled:
            raise MemOptError(
                "--memory_opt_on_oom replan with FSDP: its ranks gather parameters in the forward; leave it out, and "
                "give a budget"
            )
        self._engine = engine
        self._world_size = trainer.args.world_size
        # The user's selection, once a plan for less memory has replaced it.
        self._given: Selection | None = None
        self.times = 0

    def begin(self, trainer: Trainer) -> None:
        """Begin a run. Raises MemOptError if this Trainer's steps change state that cannot be restored."""
        self.times = 0
        if self._given is not None:
            self._engine.apply(self._given)
            self._given = None
        trained = list(_trained(trainer))
        if trainer.accelerator.has_lomo_optimizer or _steps_in_backward([*model_of(trainer).parameters(), *trained]):
            raise MemOptError(
                "--memory_opt_on_oom replan with an optimizer that steps inside the backward (LOMO, layer-wise ones, "
                "hooks of register_post_accumulate_grad_hook): a step that has begun to change parameters cannot "
                "be rerun; leave it out"
            )
        restorable = {
            *(value for value in held_by(trainer) if isinstance(value, torch.nn.Parameter)),
            *(p for module in (model_of(trainer), *modules_beside(trainer)) for p in module.parameters()),
        }
        if unknown := sum(parameter not in restorable for parameter in trained):
            raise MemOptError(
                f"--memory_opt_on_oom replan: the optimizer trains {unknown} parameters of modules that the "
                "Trainer does not hold, so that buffers in these modules cannot be restored; make the module an "
                "attribute of the Trainer, as in trainer.head = head, or leave the flag out"
            )

    def replan(self, failure: Failure, is_own: bool, before: StepState, trainer: Trainer) -> bool:
        """Choose a plan for less memory and restore the state that the step changed; False: it cannot be rerun.

        Args:
            is_own: True if this rank ran out of memory; False if another one did, so this one reruns the step under
                the same plan.
            before: the state before the step.
        """
        step = f"step {trainer.state.global_step + 1} ran out of memory"
        if why := self._refused(failure) or before.restore():
            log_from_any_rank(f"{step} and is not rerun: {why}")
            return False
        self.times += 1
        if not is_own:
            return True
        selection = self._engine.selection
        self._given, last = self._given or selection, selection.budget
        # A step may hold more than its budget, by memory that is not predicted.
        most = failure.held if last is None or last.bytes is None else min(failure.held, last.bytes)
        budget = int(most * (1 - _ROOM))
        log_from_any_rank(
            f"{step} in its {failure.place.phase} with {gib_text(failure.held)} held: planning for "
            f"{gib_text(budget)} and rerunning it ({self.times} of {_MOST})"
        )
        within = Budget(gib_text(budget).replace(" ", ""), budget)
        self._engine.apply(replace(selection, config=None, level=0, plan=None, budget=within))
        return True

    def _refused(self, failure: Failure) -> str:
        if failure.place.phase == OPTIMIZER_STEP:
            return "no plan reduces the optimizer's states"
        if self.times == _MOST:
            return f"it was already replanned {_MOST} times"
        if self._world_size > 1 and failure.place.phase != FORWARD:
            return "the other ranks wait in the backward's all-reduce, so all ranks stop"
        return ""


def modules_beside(trainer: Trainer) -> tuple[torch.nn.Module, ...]:
    """Returns modules other than the model that may take part in training steps, such as one that computes the loss.

    A reference model is in evaluation mode, changes no state, and is left out.
    """
    return tuple(value for value in held_by(trainer) if isinstance(value, torch.nn.Module) and value.training)


def _trained(trainer: Trainer) -> Iterator[torch.Tensor]:
    """Yields the optimizer's parameters, without placeholders (transformers' `LayerWiseDummyOptimizer`)."""
    for group in trainer.optimizer.param_groups if trainer.optimizer is not None else ():
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _steps_in_backward(parameters: Iterable[torch.Tensor]) -> bool:
    """True if parameters have gradient accumulation hooks, in which layer-wise optimizers step."""
    return any(map(accumulation_hooks, parameters))


# Maximum bytes of buffers to copy. Quantized weights may be buffers (GPTQ); copies take host memory and seconds.
_MOST_BUFFERS = 64 * 2**20


def kept_inputs(inputs: Any) -> Callable[[], None]:
    """Returns a function that restores the present entries of a batch. A step may remove some, such as the labels."""
    if not isinstance(inputs, MutableMapping):
        return lambda: None
    return partial(refill, inputs, dict(inputs))


def falling_back(
    trainer: Trainer, engine: Engine, training_step: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Returns `training_step` that continues without a plan if the first step's backward cannot run.

    The engine handles errors of the forward itself. With several processes the error is raised, since DDP's other
    ranks wait in the backward's all-reduce.
    """

    def step(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_first = engine.plans() is None and trainer.args.world_size == 1
        if not is_first or sum(buffer.nbytes for buffer in model_of(trainer).buffers()) > _MOST_BUFFERS:
            return training_step(model, inputs, *args, **kwargs)
        before, put_back = StepState.of(trainer, on_host=True), kept_inputs(inputs)
        try:
            return training_step(model, inputs, *args, **kwargs)
        except Exception as error:
            put_back()
            plain = engine.without_plan(error)
            if plain is None or before.restore():
                raise
            free_step(error)
        with plain:
            return training_step(model, inputs, *args, **kwargs)

    return step
