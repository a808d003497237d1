"""Guards a Trainer's steps: explains or reruns a step that runs out of memory, on all ranks alike."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import Trainer, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import HookingCallback, Reporter
from optimum_memopt.compat.transformers import outputs_read_by, train_batch_size
from optimum_memopt.copies import add_hook
from optimum_memopt.engines.api.explanations import OPTIMIZER_STEP, Failure, ForwardCall, Place
from optimum_memopt.engines.api.predictions import OTHER
from optimum_memopt.errors import DoesNotFitError, add_context, is_out_of_memory, line_of
from optimum_memopt.logs import log_from_any_rank, rank
from optimum_memopt.oom.replan import Replanner, StepState, kept_inputs
from optimum_memopt.oom.report import (
    MemoryReport,
    StepStart,
    failure_of,
    forward_call,
    free_step,
    held_at_start,
    report_of,
)
from optimum_memopt.trainer_patches import Patch

_FINE, _RAN_OUT, _FAILED = 0, 1, 2
# Set on an out-of-memory error in a step that another rank ends with another error.
_OTHERS_END = "optimum_memopt_others_end"


class OtherRankRanOutError(Exception):
    """Raised on the ranks that did not run out of memory; not an OutOfMemoryError, so retry logic ignores it."""


def agreeing(trainer: Trainer, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compute_loss` that fails on all ranks if one rank runs out of memory; ranks with enough memory raise
    OtherRankRanOutError. Costs one small all-gather per forward."""

    def compute_and_agree(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute_loss(model, *args, **kwargs)
        try:
            result = compute_loss(model, *args, **kwargs)
        except Exception as error:
            if _FAILED in _outcomes(_RAN_OUT if is_out_of_memory(error) else _FAILED, trainer.args.device):
                setattr(error, _OTHERS_END, True)
            raise
        outcomes = _outcomes(_FINE, trainer.args.device)
        # A rank that failed with another error ends the run by itself.
        if _RAN_OUT in outcomes and _FAILED not in outcomes:
            raise OtherRankRanOutError(f"rank {outcomes.index(_RAN_OUT)} ran out of memory in the forward")
        return result

    return compute_and_agree


def _outcomes(own: int, device: torch.device) -> list[int]:
    gathered = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, torch.tensor([own], dtype=torch.int32, device=device))
    return [int(outcome) for outcome in gathered]


class MemoryReportCallback(HookingCallback):
    """Explains an out-of-memory error of a training step and re-raises it unchanged. If `--auto_find_batch_size` tries
    several micro-batches, only the first error is explained.

    Works in any Trainer, with or without an engine. The report is logged and written to `output_dir` as
    `memory_report.json` and `memory_report.md`. To create it, the step's memory is freed, and the model's forward is
    traced on tensors without data. Costs 0.1 ms per step while memory suffices.

    Attributes:
        report: report of the last explained step of a run; None: no step has run out of memory.
        replanner: plans for less memory so that the step can be rerun; None: steps are not rerun.
        call: the arguments of the model's last training forward, without the data of tensors.
    """

    def __init__(self) -> None:
        super().__init__(Reporter("memory_report"))
        self.report: MemoryReport | None = None
        self.replanner: Replanner | None = None
        self.call: ForwardCall | None = None
        self._start: StepStart | None = None
        self._has_ended = False
        # Bytes of `OTHER` before the run's first step, when a CPU's malloc keeps nothing of earlier steps.
        self._first_outside: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no run and no engine.
        return {**vars(self), "replanner": None, "call": None, "_start": None}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.reporter.begin(state)
        self.call = self._start = self._first_outside = None
        # Attempts of `auto_find_batch_size` begin without the end of one before.
        if self._has_ended:
            self.report = None
        if self.replanner is not None:
            self.replanner.begin(trainer)
        self._watch_forwards(kwargs["model"])
        self._has_ended = False
        self._hooks.put(trainer, Patch.GUARDED_STEP, partial(self._guard_step, trainer))
        # Each train() wraps the optimizer again.
        if trainer.optimizer is not None:
            self._hooks.put(trainer.optimizer, Patch.GUARDED_OPTIMIZER, partial(self._guard_optimizer, trainer))

    def _guard_step(self, trainer: Trainer, training_step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
            first: Exception | None = None
            while True:
                self._start = StepStart.of(trainer)
                if self._first_outside is None:
                    self._first_outside = held_at_start(trainer, self._start, None)[OTHER]
                before = None if self.replanner is None else StepState.of(trainer, on_host=False)
                put_back = kept_inputs(inputs)
                try:
                    return training_step(model, inputs, *args, **kwargs)
                except Exception as error:
                    put_back()
                    if self._runs_again(error, before, trainer, inputs):
                        first = first or error
                    elif first is None:
                        raise
                    elif isinstance(error, DoesNotFitError | OtherRankRanOutError) or is_out_of_memory(error):
                        raise first from None
                    else:
                        add_context(error, first)
                        raise

        return step

    def _runs_again(
        self, error: Exception, before: StepState | None, trainer: Trainer, inputs: Mapping[str, Any]
    ) -> bool:
        """True if a failed step can be rerun; else explains the error if this rank ran out of memory."""
        replanner, is_own = self.replanner, is_out_of_memory(error)
        if isinstance(error, DoesNotFitError) and replanner is not None and replanner.times:
            log_from_any_rank(f"no plan fits: {error}")
        if not (is_own or isinstance(error, OtherRankRanOutError)):
            return False
        failure = failure_of(error, trainer, self._start or StepStart.of(trainer))
        free_step(error)
        if getattr(error, _OTHERS_END, False):
            log_from_any_rank("the step is not rerun: another rank failed with another error, which ends the run")
        elif replanner is not None and before is not None and replanner.replan(failure, is_own, before, trainer):
            return True
        if is_own:
            self._explain(failure, trainer, inputs)
        return False

    def _guard_optimizer(self, trainer: Trainer, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            try:
                return optimizer_step(*args, **kwargs)
            except Exception as error:
                if is_out_of_memory(error):
                    failure = failure_of(error, trainer, StepStart.of(trainer), Place(OPTIMIZER_STEP))
                    free_step(error)
                    self._explain(failure, trainer, {})
                raise

        return step

    def _explain(self, failure: Failure, trainer: Trainer, inputs: Mapping[str, Any]) -> None:
        """Log and write why memory ran out; failures in this method are logged, never raised."""
        if trainer.args.auto_find_batch_size and self.report is not None:
            tried, first = train_batch_size(trainer), self.report.rows
            log_from_any_rank(f"memory also ran out with a micro-batch of {tried} rows; explained for {first}")
            return
        try:
            start = self._start or StepStart.of(trainer)
            call = self.call.knowing(inputs) if self.call is not None else None
            self.report = report_of(failure, trainer, start, call, self._first_outside or 0)
        except Exception as second:
            log_from_any_rank(f"memory ran out, and the cause is unknown ({line_of(second)})")
            return
        text = self.report.to_text()
        log_from_any_rank(text if rank() == 0 else text.split("\n\n")[0])
        try:
            written = self.report.save(Path(str(trainer.args.output_dir)))
            log_from_any_rank(f"written to {' and '.join(map(str, written))}")
        except OSError as second:
            log_from_any_rank(f"could not write the report ({line_of(second)})")

    def _watch_forwards(self, model: torch.nn.Module) -> None:
        self.remove_hooks()  # left by a run that failed
        # A plain function with weak references, since shallow copies of the model share its hooks.
        hooked, held = weakref.ref(model), weakref.ref(self)

        @torch.compiler.disable
        def before_forward(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            callback = held()
            if callback is not None and module is hooked() and torch.is_grad_enabled():
                callback.call = forward_call(args, kwargs, outputs_read_by())

        self._hooks.callback(add_hook(model, "forward_pre", before_forward, with_kwargs=True))

    def remove_hooks(self) -> None:
        super().remove_hooks()
        self.call, self._has_ended = None, True
