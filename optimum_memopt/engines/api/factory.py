"""Engine factories: what an engine can answer before it has a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.explanations import Explanation, FailedStep
from optimum_memopt.engines.api.predictions import (
    ModelOfRun,
    PlannedDevice,
    StepEstimate,
    StepPredictor,
    Way,
    Workload,
)
from optimum_memopt.engines.api.run import Options, Selection
from optimum_memopt.sizes import Budget
from optimum_memopt.step_settings import StepSpec

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


@dataclass(frozen=True)
class Ability:
    """A feature: whether it works here, why (not), and the shell command that enables it ("" if none)."""

    what: str
    works: bool
    why: str
    command: str = ""


@dataclass(frozen=True)
class Report:
    """Versions, abilities and extensions of an engine on this machine.

    Attributes:
        installed: versions of the engine's dependencies; None if not installed.
        abilities: the engine's abilities; the first is the engine itself.
        advice: when to use the engine; empty if it does not work here.
        built: paths of the extensions that this package has built, by name.
    """

    installed: Mapping[str, str | None]
    abilities: tuple[Ability, ...]
    advice: str = ""
    built: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerParts:
    """Wrappers and callbacks that an engine needs on a Trainer.

    Attributes:
        wrap_loss: returns a wrapper of the given `compute_loss`; None: not wrapped.
        callbacks: callbacks to add to the Trainer's.
        wrap_norm: returns a wrapper of the given method that returns the gradient norm to log; None: not wrapped.
    """

    wrap_loss: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    callbacks: "tuple[TrainerCallback, ...]" = ()
    wrap_norm: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


class EngineFactory(Generic[Options]):
    """Creates an engine, and answers for it before it has a model. The defaults suit an engine without requirements.

    Attributes:
        predicts: whether it has `planned_device`, `estimate`, `plain_ways`, `explain`, `predict_steps`
            and `largest_batch`.
        allocates_outside_torch: whether its CUDA memory bypasses torch's allocator.
        options_to_measure: options that turn a model that the engine cannot train into an error, so that no fallback
            is measured instead.
    """

    predicts = False
    allocates_outside_torch = False
    options_to_measure: Mapping[str, Any] = {}

    def missing(self) -> str:
        """Returns why this engine cannot work here and how to install it; empty if it can."""
        return ""

    def declines(self, options: Options) -> str:
        """Returns why `auto` skips this engine for these options; empty if it does not."""
        return ""

    def check_options(self, options: Options) -> None:
        """Refuse options that cannot work on this machine, before a model or data is loaded. Raises MemOptError."""

    def in_force(self, options: Options, environ: Mapping[str, str]) -> tuple[Options, tuple[str, ...]]:
        """Returns the options with overrides from this engine's environment variables, without changing the given
        ones, and a line for each override. Raises MemOptError for an invalid value."""
        return options, ()

    def create(self, options: Options, selection: Selection) -> Engine:
        """Returns a new engine with options of `in_force`, not yet attached; logs nothing. Raises MemOptError for
        plans that it cannot apply."""
        raise NotImplementedError

    def trainer_parts(self, trainer: "Trainer", engine: Engine, options: Options) -> TrainerParts:
        """Returns the parts that this engine's options need on a Trainer, without changing it; called for every
        engine, whichever trains. Raises MemOptError for options that conflict with this Trainer."""
        return TrainerParts()

    def environment_report(self) -> Report:
        """Returns versions and abilities on this machine; compiles nothing."""
        return Report({}, ())

    def build(self) -> None:
        """Build this engine's own extensions ahead of use. Raises MemOptError."""

    def planned_device(self, device: str | None) -> PlannedDevice:
        """Returns the device that steps are predicted for.

        Args:
            device: a name such as `h100`, or a JSON file; None: this machine's.

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
            symbolic: keep sizes as symbols, so that savings are formulas; several times slower.
            with_curve: also predict the cost of budgets.
            with_ways: also compare the engine without a plan, level 1 and the selected plan.
            batch_sizes: also predict a step with each of these sizes, from one trace with the workload's batch size,
                which is the largest; sizes stay symbols.

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

    def explain(self, failed: FailedStep) -> Explanation:
        """Explain why a step ran out of memory, whichever engine trained it; allocates little on its device."""
        raise NotImplementedError

    def predict_steps(self, workload: Workload | ModelOfRun, options: Options, spec: StepSpec) -> StepPredictor:
        """Returns a predictor of steps with any micro-batch, for a `Workload` under several plans.

        Args:
            workload: the model; its batch size is ignored.
            options: options with a budget.
            spec: the step; for a `ModelOfRun` only its compiler, precision and optimizer are used.

        Raises:
            MemOptError: as for `estimate`, and if the graph is specialized to one batch size.
        """
        raise NotImplementedError

    def largest_batch(self, workload: Workload, selection: Selection, spec: StepSpec, budget: Budget) -> int:
        """Returns the largest batch size whose step is predicted to be within a budget, 0 if one row is too many; the
        search starts at the workload's. Other arguments and errors are those of `estimate`."""
        raise NotImplementedError

    def version_facts(self) -> dict[str, str]:
        """Returns facts, beside the options, that must be equal on all ranks: versions, environment variables."""
        return {}
