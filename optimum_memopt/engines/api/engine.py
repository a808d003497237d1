"""An engine: trains a model, in place, under a memory plan."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from optimum_memopt.engines.api.predictions import Frontier, StepTimeline
from optimum_memopt.engines.api.run import Run, Selection
from optimum_memopt.plans.plan_file import PlanFile
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import TrainingArguments


class Smoothing(Protocol):
    """Label smoothing as a part of the training forward."""

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with the smoothed loss in its outputs."""


class Engine(Protocol):
    """Trains a model, in place, under a memory plan. The defaults are those of an engine that does no more than that.

    Attributes:
        reason: why this engine trains the model.
        outputs_read_by: asked at each training forward: who may read more of its outputs than the loss, empty when
            nobody does. None where there is no Trainer to ask.
        run: the run that it trains in; None where there is no Trainer to ask.
    """

    name: str
    reason: str = "asked for"
    outputs_read_by: Callable[[], str] | None = None
    run: Callable[[], Run] | None = None

    @property
    def selection(self) -> Selection:
        """The plans that were asked for."""

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Refuse Trainer arguments that this engine cannot train with. Raises MemOptError."""

    def attach(self, model: torch.nn.Module) -> None:
        """Take over the model's training forward, until `suspend` or `detach`. Raises UnsupportedModelError for what
        the engine cannot train, MemOptError where the model has an engine already, or this engine another model."""

    def suspend(self) -> None:
        """Restore the model. What was compiled for it is kept for the next `attach`, as are the plans."""

    def detach(self) -> None:
        """Restore the model and free what was compiled for it; without effect when nothing is attached."""

    def smooth_labels(self, smoothing: Smoothing | None) -> bool:
        """Return the smoothed loss from training forwards with labels, from now on; False: this engine does not."""
        return False

    def norm_with(self, norm: Callable[..., Any]) -> Callable[..., Any]:
        """`norm`, which returns that of a step's gradients, with that of gradients which the engine has released."""
        return norm

    def plans(self) -> PlanTable | None:
        """The table of the current training graph, None before the first training forward."""

    def plan_file(self) -> PlanFile | None:
        """The plan activation by activation, to be applied again; None before the first training forward, and where
        the engine has no plan files."""
        return None

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> float | None:
        """The predicted peak of the largest step of the run so far, MiB; None where the engine does not predict. The
        optimizer is None before there is one."""
        return None

    def timeline(self, optimizer: torch.optim.Optimizer | None, gradient_accumulation: bool) -> StepTimeline | None:
        """The largest step of the run so far as predicted, operator by operator; arguments and None as in
        `predicted_peak_mib`."""
        return None

    def frontier(self) -> Frontier | None:
        """Returns the time-memory frontier with the active budget marked; None if none was solved."""
        return None

    def insight(self) -> str:
        """The engine's own per-node text for `--memory_opt_log_level devinfo`, empty when there is none."""
        return ""

    def apply(self, selection: Selection) -> None:
        """Choose other plans; takes effect with the next training forward."""

    def without_plan(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        """Within it training forwards are plain PyTorch's, and from then on unless it ends in an error.

        Args:
            error: of the backward of a first step; None is returned where it is none of what the engine has compiled.

        Raises:
            MemOptError: at its end, where the plan that was asked for must hold.
        """
        return None

    def check_used(self) -> None:
        """Refuse to go on where training calls parts of the model, and not its forward, or somebody has replaced that
        since; a warning where no plan was asked for. Raises UnsupportedModelError."""
