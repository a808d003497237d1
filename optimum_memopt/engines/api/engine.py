"""The engine protocol: an engine trains a model, in place, under a memory plan."""

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
    """Label smoothing inside the training forward."""

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `forward` with the smoothed loss in its outputs."""


class Engine(Protocol):
    """Trains a model, in place, under a memory plan. The defaults suit an engine without optional features.

    Attributes:
        reason: why this engine was selected.
        outputs_read_by: called at each training forward; returns what may read outputs other than the loss, empty if
            nothing does. None without a Trainer.
        run: returns the current training run; None without a Trainer.
    """

    name: str
    reason: str = "asked for"
    outputs_read_by: Callable[[], str] | None = None
    run: Callable[[], Run] | None = None

    @property
    def selection(self) -> Selection:
        """Returns the requested plans."""

    def check_arguments(self, args: "TrainingArguments") -> None:
        """Refuse Trainer arguments that this engine cannot train with. Raises MemOptError."""

    def attach(self, model: torch.nn.Module) -> None:
        """Take over the model's training forward, until `suspend` or `detach`. Raises UnsupportedModelError if the
        engine cannot train the model, MemOptError if the model already has an engine, or this engine another model."""

    def suspend(self) -> None:
        """Restore the model. Compiled code and plans are kept for the next `attach`."""

    def detach(self) -> None:
        """Restore the model and free the code compiled for it; no effect if nothing is attached."""

    def smooth_labels(self, smoothing: Smoothing | None) -> bool:
        """Compute the smoothed loss in training forwards with labels from now on; False if not supported."""
        return False

    def norm_with(self, norm: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `norm`, the function for a step's gradient norm, extended to gradients the engine has released."""
        return norm

    def plans(self) -> PlanTable | None:
        """Returns the plan table of the current training graph; None before the first training forward."""

    def plan_file(self) -> PlanFile | None:
        """Returns the plan per activation, for reuse; None before the first training forward, or if the engine has no
        plan files."""
        return None

    def predicted_peak_mib(self, optimizer: torch.optim.Optimizer | None) -> float | None:
        """Returns the predicted peak of the run's largest step so far, in MiB; None if the engine does not predict.
        The optimizer is None before it is created."""
        return None

    def timeline(self, optimizer: torch.optim.Optimizer | None) -> StepTimeline | None:
        """Returns the prediction of the run's largest step so far, operator by operator; arguments and None as in
        `predicted_peak_mib`."""
        return None

    def frontier(self) -> Frontier | None:
        """Returns the time-memory frontier with the active budget marked; None if none was solved."""
        return None

    def insight(self) -> str:
        """Returns the engine's own per-node text for `--memory_opt_log_level devinfo`, empty if there is none."""
        return ""

    def apply(self, selection: Selection) -> None:
        """Select other plans, from the next training forward on."""

    def without_plan(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        """Returns a context in which training forwards run as plain PyTorch, and stay so unless it ends in an error.

        Args:
            error: error of a first step's backward. None is returned if it is not from code that the engine compiled.

        Raises:
            MemOptError: on exit, if the requested plan is mandatory.
        """
        return None

    def check_used(self) -> None:
        """Refuse to go on if training calls parts of the model instead of its forward, or if the forward has been
        replaced since `attach`; only warns if no plan was requested. Raises UnsupportedModelError."""
