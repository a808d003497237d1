"""The factory of an engine: what it can answer before it has a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.explanations import Explanation, FailedStep
from optimum_memopt.engines.api.predictions import (
    ModelOfRun,
    PlannedDevice,
    Simulator,
    StepEstimate,
    StepPredictor,
    Way,
    Workload,
)
from optimum_memopt.engines.api.run import Options, Selection
from optimum_memopt.sizes import Budget
from optimum_memopt.step_settings import StepSpec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from transformers import Trainer, TrainerCallback


@dataclass(frozen=True)
class Ability:
    """Something a user may want: whether it works here, why (not), and the shell command that gets it ("" if none)."""

    what: str
    works: bool
    why: str
    command: str = ""


@dataclass(frozen=True)
class Report:
    """Versions, abilities and extensions of an engine on this machine.

    Attributes:
        installed: versions of what the engine stands on, None for what is not there.
        abilities: the engine itself first.
        advice: when to take it; empty when it does not work here.
        built: paths of what the package has built for itself, by name.
    """

    installed: Mapping[str, str | None]
    abilities: tuple[Ability, ...]
    advice: str = ""
    built: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerParts:
    """A wrapper and callbacks that an engine needs on a Trainer.

    Attributes:
        wrap_loss: given `compute_loss`, returns what goes around it; None: nothing does.
        callbacks: beside those that the Trainer has.
        wrap_norm: given the method that returns the norm of gradients to log, returns what goes around it.
    """

    wrap_loss: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    callbacks: "tuple[TrainerCallback, ...]" = ()
    wrap_norm: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


class EngineFactory(Generic[Options]):
    """Makes an engine, and answers for it before it has a model. The defaults are those of an engine without needs.

    Attributes:
        predicts: has `planned_device`, `estimate`, `plain_ways`, `simulator`, `explain`, `predict_steps` and
            `largest_batch`.
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

    def declines(self, options: Options) -> str:
        """Why `auto` passes this engine over for these options; empty when it does not."""
        return ""

    def check_options(self, options: Options) -> None:
        """Refuse what cannot work on this machine, before a model or data is loaded. Raises MemOptError."""

    def in_force(self, options: Options, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
        """The options, left as they are, as this engine's environment variables change them, and a line for each of
        these. Raises MemOptError for a value that is not allowed."""
        return options, ()

    def create(self, options: Options, selection: Selection) -> Engine:
        """An engine with options of `in_force`, not yet attached; logs nothing. Raises MemOptError for plans that it
        cannot apply."""
        raise NotImplementedError

    def trainer_parts(self, trainer: "Trainer", engine: Engine, options: Options) -> TrainerParts:
        """The parts that this engine's options need on a Trainer, which is left as it is; called for all engines,
        whichever trains. Raises MemOptError for options that do not go with this Trainer."""
        return TrainerParts()

    def environment_report(self) -> Report:
        """Versions and abilities on this machine; compiles nothing."""
        return Report({}, ())

    def build(self) -> None:
        """Build what this engine can compile for itself ahead of use. Raises MemOptError."""

    def planned_device(self, device: str | None) -> PlannedDevice:
        """The device that steps are predicted for.

        Args:
            device: as `h100` or a JSON file; None: this machine's.

        Raises:
            MemOptError: an unknown device.
        """
        raise NotImplementedError

    def estimate(
        self,
        workload: Workload,
        selection: Selection,
        spec: StepSpec,
        *,
        symbolic: bool = False,
        with_curve: bool = False,
        with_ways: bool = False,
        batch_sizes: Sequence[int] = (),
    ) -> StepEstimate:
        """Predict a training step without running it.

        Args:
            symbolic: sizes stay symbols, so that savings are formulas; several times slower.
            with_curve: predict what budgets cost, too.
            with_ways: compare the engine without a plan, level 1 and what is selected, too.
            batch_sizes: predict a step of each, too, from one trace with the workload's, the largest of them; sizes
                stay symbols.

        Raises:
            MemOptError: an unknown device or optimizer, bad sizes or plans, or a model that cannot be traced without
                data.
        """
        raise NotImplementedError

    def plain_ways(self, workload: Workload, spec: StepSpec) -> tuple[Way, ...]:
        """Predict steps of plain PyTorch, without and with Trainer's checkpointing.

        Raises:
            MemOptError: an unknown device or optimizer, or a model that cannot be built or reads its tensors' values.
        """
        raise NotImplementedError

    def simulator(self, device: str | None) -> "AbstractContextManager[Simulator]":
        """Runs steps of a user's own, of which nothing but tensors without data is made.

        Args:
            device: whose operators and allocator count, as `h100` or a JSON file; None: this machine's.

        Raises:
            MemOptError: an unknown device.
        """
        raise NotImplementedError

    def explain(self, failed: FailedStep) -> Explanation:
        """Why a step ran out of memory, whichever engine trained it; next to nothing is allocated on its device."""
        raise NotImplementedError

    def predict_steps(self, workload: Workload | ModelOfRun, options: Options, spec: StepSpec) -> StepPredictor:
        """Predict steps with any micro-batch, of a `Workload` under several plans.

        Args:
            workload: the model; its batch size counts for nothing.
            options: with a budget.
            spec: of a `ModelOfRun`, its compiler, precision and optimizer alone.

        Raises:
            MemOptError: as `estimate`, and where the graph is for one batch size only.
        """
        raise NotImplementedError

    def largest_batch(self, workload: Workload, selection: Selection, spec: StepSpec, budget: Budget) -> int:
        """The most rows with which a step is predicted to be within a budget, 0 where one is too many; searched from
        the workload's on. Other arguments and errors are those of `estimate`."""
        raise NotImplementedError

    def version_facts(self) -> dict[str, str]:
        """Facts that must be the same on all ranks beside the options: versions, environment variables."""
        return {}
