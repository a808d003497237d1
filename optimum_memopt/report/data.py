"""The numbers of a run or of a prediction, for the page about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.callbacks.reporting import METRIC_PREFIX
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.predictions import PHASES, Estimate, Frontier, Phase, StepTimeline, Way
from optimum_memopt.errors import excerpt
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import Trainer


# Held at the end of a phase, and its peak: of torch's allocator on CUDA, else resident memory.
_READINGS = (("allocated_mib", "max_allocated_mib"), ("resident_mib", "peak_resident_mib"))
_DENSITY = "density/"
_MOST_POINTS = 512
_T = TypeVar("_T")


@dataclass(frozen=True)
class MeasuredStep:
    """The phases of one step, and how many optimizer steps there had been with it."""

    step: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases)


class CollectingCallback(TrainerCallback):
    """Keeps what the memory phases and the input density report, on the world's rank 0.

    Attributes:
        phases: of the step with the highest peak that was measured; the first step, which compiles, only where there
            is no other.
        densities: percent of each input that is not padding, by step; of a long run some of the steps.
    """

    def __init__(self) -> None:
        self.phases: MeasuredStep | None = None
        self.densities: dict[str, list[tuple[int, float]]] = {}
        self._first_step = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.phases, self.densities, self._first_step = None, {}, state.global_step + 1

    def on_memopt_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        values = {name.removeprefix(METRIC_PREFIX): value for name, value in logs.items()}
        step = state.global_step
        if phases := _phases(values):
            latest, kept = MeasuredStep(step, phases), self.phases
            if kept is None or kept.step == self._first_step or latest.peak > kept.peak:
                self.phases = latest
        for name, value in values.items():
            if name.startswith(_DENSITY):
                points = self.densities.get(name.removeprefix(_DENSITY), [])
                self.densities[name.removeprefix(_DENSITY)] = thinned([*points, (step, value)], _MOST_POINTS)


def thinned(points: Sequence[_T], most: int) -> list[_T]:
    """Every second of the points, where there are more than `most`; the last is one of them."""
    return list(points) if len(points) <= most else [*points[:-1:2], points[-1]]


def _phases(values: Mapping[str, float]) -> tuple[Phase, ...]:
    return tuple(
        Phase(phase, round(values[f"{phase}/{held}"] * MIB), round(values[f"{phase}/{peak}"] * MIB))
        for phase in PHASES
        for held, peak in _READINGS
        if f"{phase}/{held}" in values and f"{phase}/{peak}" in values
    )


@dataclass(frozen=True)
class ReportData:
    """A training step as the page shows it; sizes are bytes.

    Attributes:
        title: what trained, or would.
        facts: names and values, as `engine` and `compile`.
        failure: how the run ended, where it did not end by itself.
        table: None where no step has run.
        timeline: None where nothing is predicted.
        frontier: what budgets cost; None where nobody asked.
        measured: phases of the measured step with the highest peak; None without `--log_memory_phases`.
        measured_peak: of the run; 0 where nothing has run.
        measures: what was measured: `resident` or `allocated`.
        densities: percent of each input that is not padding, by step.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    failure: str = ""
    table: PlanTable | None = None
    timeline: StepTimeline | None = None
    frontier: Frontier | None = None
    measured: MeasuredStep | None = None
    measured_peak: int = 0
    measures: str = "resident"
    densities: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)


def of_way(way: Way, model: str) -> ReportData:
    """A step of plain PyTorch that was not run."""
    sizes = way.timeline.sizes if way.timeline is not None else {}
    return ReportData(
        title=f"A step of {way.plan.name}",
        facts=(("model", excerpt(model)), ("batch", sizes_text(sizes))),
        timeline=way.timeline,
    )


def of_estimate(estimate: Estimate, model: str) -> ReportData:
    """A step that was not run."""
    table = estimate.table
    facts = (("model", excerpt(model)), ("batch", sizes_text(table.symbols)))
    title = (table.header or ("Training step",))[0]
    return ReportData(title, facts, table=table, timeline=estimate.timeline, frontier=estimate.frontier)


def of_training(
    trainer: "Trainer", engine: Engine, plan_stats: PlanStatsCallback, collected: CollectingCallback, failure: str
) -> ReportData:
    """A run so far, or one that is over; `engine` holds its model, or has held it."""
    table = engine.plans()
    timeline = None
    with best_effort("the step's timeline"):
        timeline = engine.timeline(trainer.optimizer, trainer.args.gradient_accumulation_steps > 1)
    return ReportData(
        title=table.header[0] if table is not None and table.header else type(trainer.model).__name__,
        facts=_facts(trainer, engine),
        failure=failure,
        table=table,
        timeline=timeline,
        frontier=engine.frontier(),
        measured=collected.phases,
        measured_peak=round(plan_stats.measured_peak_mib * MIB),
        measures="allocated" if trainer.args.device.type == "cuda" else "resident",
        densities=collected.densities,
    )


def sizes_text(sizes: Mapping[str, int]) -> str:
    """`inputs_input_ids_dim0=16, inputs_input_ids_dim1=111`."""
    return ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))


def _facts(trainer: "Trainer", engine: Engine) -> tuple[tuple[str, str], ...]:
    args, state = trainer.args, trainer.state
    batch = f"{args.per_device_train_batch_size} rows"
    if args.gradient_accumulation_steps > 1:
        batch += f", {args.gradient_accumulation_steps} accumulated"
    if args.world_size > 1:
        batch += f", on {args.world_size} processes; this page is of rank 0"
    return (
        ("engine", f"{engine.name} ({engine.reason})"),
        ("model", type(trainer.model).__name__),
        ("micro-batch", batch),
        ("optimizer steps", f"{state.global_step} of {state.max_steps}"),
        ("mixed precision", "bf16" if args.bf16 else "fp16" if args.fp16 else "no"),
    )
