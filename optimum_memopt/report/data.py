"""The numbers of a run or of a prediction, for the page about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MeasuredStep, MemoryPhasesCallback
from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.callbacks.reporting import callback_of
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.predictions import Estimate, Frontier, StepTimeline, Way
from optimum_memopt.errors import excerpt
from optimum_memopt.logs import best_effort
from optimum_memopt.memory.peak_monitor import MIB
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import Trainer


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


def of_training(trainer: "Trainer", engine: Engine, failure: str) -> ReportData:
    """A run so far, or one that is over; `engine` holds its model, or has held it."""
    table, plan_stats = engine.plans(), callback_of(trainer, PlanStatsCallback)
    phases, density = callback_of(trainer, MemoryPhasesCallback), callback_of(trainer, InputDensityCallback)
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
        measured=None if phases is None else phases.highest_step,
        measured_peak=0 if plan_stats is None else round(plan_stats.measured_peak_mib * MIB),
        measures="allocated" if trainer.args.device.type == "cuda" else "resident",
        densities={} if density is None else density.densities,
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
