"""Before the first step of a run within a budget: the phases beside training that would pass it."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from optimum_memopt.callbacks.reporting import Reporter
from optimum_memopt.engines.shared.registry import predicting_factory
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.capacity import host_available
from optimum_memopt.memory.optimizers import DEFAULT, PlannedOptimizer, embeddings_of, is_known
from optimum_memopt.predict.phases import EVALUATION, GENERATION, RunPhase, host_suggestions, suggestions
from optimum_memopt.sizes import AUTO, Budget, gib_text
from optimum_memopt.training.fake_run import (
    FakeRun,
    evaluation_data,
    holders_of,
    is_sharded,
    left_as_it_is,
    replace_tensors,
)


class PhaseCheckCallback(TrainerCallback):
    """Says which phases of a run beside its training steps would pass the budget, and with which flags they fit.

    Raises:
        MemOptError: at the start of a run, for a phase that takes more than the device has, whatever the data are.
    """

    def __init__(self, budget: Budget) -> None:
        self.reporter = Reporter("phases")
        self._budget = budget

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        trainer = self.reporter.begin(state)
        certain: tuple[str, ...] = ()
        with best_effort("what phases beside training take"):
            try:
                certain = self._check(trainer)
            except MemOptError as error:
                self.reporter.lines(f"phases beside training are not predicted: {error}")
        if certain:
            raise MemOptError("; ".join(certain))

    def _check(self, trainer: Any) -> tuple[str, ...]:
        """Log what may not fit; returns a line for each phase that certainly does not."""
        if is_sharded(trainer):
            return ()
        with left_as_it_is(trainer):
            data = evaluation_data(trainer, reads_any=False) if _evaluates(trainer.args) else None
            with predicting_factory().simulator(None) as simulator:
                memory = simulator.memory
                limit = min(memory.total, self._budget.on_device(memory.total, memory.available))
                models = [holder for holder in holders_of(trainer) if isinstance(holder, torch.nn.Module)]
                coming = _coming_states(trainer)
                replace_tensors(trainer, simulator, models)
                run = FakeRun(trainer, trainer.model, simulator, models, coming)
                phases: list[RunPhase] = []
                flags = {}
                if data is not None:
                    evaluation, phases = run.evaluate(simulator.copy(data))
                    flags = dict.fromkeys((GENERATION, EVALUATION), evaluation.suggestion(limit))
                save, resume = run.save_and_resume()
        text = self._budget.text
        if text == AUTO:
            self.reporter.lines(
                f"--memory_opt_budget {text}: {gib_text(limit)} of {gib_text(memory.total)}, of which others hold "
                f"{gib_text(memory.elsewhere)}"
            )
        if save.peak > limit:
            # No training step fits either, which the engine says.
            return ()
        if trainer.args.save_strategy != SaveStrategy.NO:
            phases += save, resume
        if certain := suggestions([phase for phase in phases if phase.least > memory.total], memory.total, flags):
            return certain
        for line in (*suggestions(phases, limit, flags), *host_suggestions(phases, host_available())):
            self.reporter.lines(f"--memory_opt_budget {text}: {line}", "warning")
        return ()


def _evaluates(args: Any) -> bool:
    return bool(args.do_eval or args.do_predict or args.eval_on_start)


def _coming_states(trainer: Any) -> int:
    """Bytes of the states that the optimizer has after its first step; 0 where it has them."""
    if trainer.optimizer.state:
        return 0
    parameters = [each for group in trainer.optimizer.param_groups for each in group["params"] if each.requires_grad]
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    is_on_cuda = bool(parameters) and parameters[0].is_cuda
    planned = PlannedOptimizer(name if is_known(name) else DEFAULT, is_on_cuda, embeddings_of(trainer.model))
    return sum(planned.state_sizes(parameters))
