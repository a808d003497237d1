"""What an engine is, and what is asked of one that has no model yet."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from optimum_memopt.engines.environment import Report
from optimum_memopt.engines.estimates import Estimate, Frontier, Workload
from optimum_memopt.engines.failed_step import Explanation, FailedStep
from optimum_memopt.engines.predicted_steps import StepPredictor
from optimum_memopt.engines.run import Run
from optimum_memopt.engines.step_timeline import StepTimeline
from optimum_memopt.plans.grammar import PlanConfig
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import Budget

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from optimum_memopt.options import MemOptOptions


@dataclass(frozen=True)
class Selection:
    """What the user asked for: a config, a level from 1 on, a budget, or a plan file.

    `strict`: ids that do not exist are errors instead of remarks.
    """

    config: PlanConfig | None = None
    level: int = 0
    strict: bool = True
    budget: Budget | None = None
    plan: PlanFile | None = None

    @property
    def name(self) -> str:
        """`level 1`; empty where nothing was asked for."""
        if self.plan is not None:
            return "the plan file"
        if self.budget is not None:
            return f"the plan of budget {self.budget.text}"
        if self.level:
            return f"level {self.level}"
        return "" if self.config is None else f"config {self.config}"


class Smoothing(Protocol):
    """Label smoothing as a part of the training forward."""

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with the smoothed loss in its outputs."""


class Engine(Protocol):
    """Trains a model, in place, under a memory plan.

    Attributes:
        reason: why this engine trains the model.
        outputs_read_by: asked at each training forward: who may read more of its outputs than the loss, empty when
            nobody does. None where there is no Trainer to ask.
        run: the run that it trains in; None where there is no Trainer to ask.
    """

    reason: str
    outputs_read_by: Callable[[], str] | None
    run: Callable[[], Run] | None

    @property
    def name(self) -> str:
        """As it is registered."""

    @property
    def selection(self) -> Selection:
        """The plans that were asked for."""

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Refuse Trainer arguments that this engine cannot train with. Raises MemOptError."""

    def attach(self, model: torch.nn.Module) -> None:
        """Take over the model's training forward. Raises MemOptError for what the engine cannot train."""

    def suspend(self) -> None:
        """Restore the model. What was compiled for it is kept for the next `attach`, as are the plans."""

    def detach(self) -> None:
        """Restore the model and free what was compiled for it; without effect when nothing is attached."""

    def smooth_labels(self, smoothing: "Smoothing | None") -> bool:
        """Return the smoothed loss from training forwards with labels, from now on; False: this engine does not."""

    def plans(self) -> PlanTable | None:
        """The table of the current training graph, None before the first training forward."""

    def plan_file(self) -> PlanFile | None:
        """What is done to each activation, to be applied again; None before the first training forward, and where the
        engine has no plan files."""

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        """What the largest step of the run so far should have held, MiB; None where the engine does not predict.

        Args:
            optimizer: the run's, None before there is one.
            gradient_accumulation: whether gradients of several micro-batches add up.
        """

    def timeline(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> StepTimeline | None:
        """What the largest step of the run so far should have held, operator by operator; arguments and None as in
        `predicted_peak_mib`."""

    def frontier(self) -> Frontier | None:
        """What budgets cost, and the one that trains; None where nobody has solved for them."""

    def insight(self) -> str:
        """The engine's own per-node text for `--memory_opt_log_level devinfo`, empty when there is none."""

    def apply(self, selection: Selection) -> None:
        """Choose other plans; takes effect with the next training forward."""

    def without_plan(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        """Within it training forwards are plain PyTorch's, and from then on unless it ends in an error.

        Args:
            error: of the backward of a first step; None is returned where it is none of what the engine has compiled.

        Raises:
            MemOptError: at its end, where the plan that was asked for must hold.
        """

    def check_used(self) -> None:
        """Refuse to go on where training calls parts of the model, and not its forward; a warning where no plan was
        asked for. Raises UnsupportedModelError."""


class EngineFactory:
    """What can be asked of an engine that has no model yet. The defaults are those of an engine without needs.

    Attributes:
        predicts: has `estimate`, `explain` and `predict_steps`.
        allocates_outside_torch: its memory on CUDA is not torch's allocator's.
        options_to_measure: options under which a model that the engine cannot train ends in an error, so that nothing
            else is measured in its place.
    """

    predicts = False
    allocates_outside_torch = False
    options_to_measure: Mapping[str, Any] = {}

    def missing(self) -> str:
        """Why this engine cannot work here and how to get it; empty when it can."""
        return ""

    def declines(self, options: "MemOptOptions") -> str:
        """Why `auto` passes this engine over for these options; empty when it does not."""
        return ""

    def check_options(self, options: "MemOptOptions") -> None:
        """Refuse what cannot work on this machine, before a model or data is loaded. Raises MemOptError."""

    def in_force(
        self, options: "MemOptOptions", environ: Mapping[str, str]
    ) -> tuple["MemOptOptions", tuple[str, ...]]:
        """The options as this engine's own environment variables change them, and a line for each variable.

        Args:
            options: left as they are.
            environ: like `os.environ`.

        Raises:
            MemOptError: a variable has a value that is not allowed.
        """
        return options, ()

    def create(self, options: "MemOptOptions", selection: Selection) -> Engine:
        """An engine, not yet attached; logs nothing.

        Args:
            options: as `in_force` returned them.
            selection: the plans that were asked for.

        Raises:
            MemOptError: the engine cannot do what is selected.
        """
        raise NotImplementedError

    def prepare_trainer(self, trainer: "Trainer", engine: Engine, options: "MemOptOptions") -> None:
        """Put what this engine's options ask for into a Trainer. Called for all engines, whichever trains.

        Args:
            trainer: before its `train()`.
            engine: the one that trains.
            options: as `in_force` returned them.

        Raises:
            MemOptError: the options do not go with this Trainer, which is left as it was.
        """

    def environment_report(self) -> Report:
        """What this engine finds on this machine; compiles nothing."""
        return Report({}, ())

    def build(self) -> None:
        """Build what this engine can compile for itself ahead of use. Raises MemOptError."""

    def estimate(self, workload: Workload, selection: Selection, **more: Any) -> Estimate:
        """Predict a training step without running it; only where `predicts`.

        Args:
            workload: the model and the size of its batch.
            selection: the plans that were asked for.
            more: of the engine's own estimate, as `device` and `compiler`.

        Raises:
            MemOptError: bad sizes or plans, or a model that cannot be traced without data.
        """
        raise NotImplementedError

    def explain(self, failed: FailedStep) -> Explanation:
        """Why a training step ran out of memory, whichever engine trained it; only where `predicts`.

        Allocates next to nothing on the model's device.
        """
        raise NotImplementedError

    def predict_steps(self, model: "Workload | torch.nn.Module", **more: Any) -> StepPredictor:
        """Predict steps with any micro-batch, of a `Workload` under several plans; only where `predicts`.

        `more` is the engine's own. Raises MemOptError: as `estimate`, and where the graph is for one batch size only.
        """
        raise NotImplementedError

    def largest_batch(self, workload: Workload, selection: Selection, budget: Budget, **more: Any) -> int:
        """The most rows with which a step is predicted to be within a budget, 0 where one is too many; only where
        `predicts`. The search begins with the workload's; other arguments and errors are those of `estimate`.
        """
        raise NotImplementedError

    def version_facts(self) -> dict[str, str]:
        """What must be the same on all ranks beside the options: versions, environment variables."""
        return {}
