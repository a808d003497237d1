"""What a page about a training step shows: gathered here, drawn elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optimum_memopt.callbacks.collected import CollectingCallback, MeasuredStep
from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.engines.base import Engine
from optimum_memopt.engines.estimates import Estimate, Frontier
from optimum_memopt.engines.step_timeline import StepTimeline
from optimum_memopt.errors import excerpt
from optimum_memopt.logs import best_effort
from optimum_memopt.plans.table import PlanTable

if TYPE_CHECKING:
    from transformers import Trainer

_MIB = 2**20


@dataclass(frozen=True)
class ReportData:
    """What is known of a training step; sizes are bytes.

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


def of_estimate(found: Estimate, model: str, task: str) -> ReportData:
    """A step that was not run.

    Args:
        found: the prediction.
        model: as the user named it.
        task: of the model.
    """
    facts = (("model", excerpt(model)), ("task", task), ("batch", sizes_text(found.table.symbols)))
    return ReportData(
        title=(found.table.header or ("Training step",))[0],
        facts=facts,
        table=found.table,
        timeline=found.timeline,
        frontier=found.frontier,
    )


def of_training(
    trainer: "Trainer",
    engine: Engine,
    plan_stats: PlanStatsCallback,
    collected: CollectingCallback,
    failure: str = "",
) -> ReportData:
    """A run so far, or one that is over.

    Args:
        trainer: that has trained.
        engine: that holds its model, or has held it.
        plan_stats: of the run.
        collected: of the run.
        failure: see `failure_text`.
    """
    table = engine.plans()
    timeline = None
    with best_effort("the step's timeline"):
        timeline = engine.timeline(trainer.optimizer, trainer.args.gradient_accumulation_steps > 1)
    return ReportData(
        title=(table.header if table is not None and table.header else (type(trainer.model).__name__,))[0],
        facts=_facts(trainer, engine),
        failure=failure,
        table=table,
        timeline=timeline,
        frontier=engine.frontier(),
        measured=collected.phases,
        measured_peak=round(plan_stats.measured_peak_mib * _MIB),
        measures="allocated" if trainer.args.device.type == "cuda" else "resident",
        densities={name: tuple(points) for name, points in collected.densities.items()},
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
        ("mixed precision", _precision(args)),
    )


def _precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


def failure_text(failure: BaseException) -> str:
    """What has ended a run, in a line."""
    reason = next(iter(str(failure).splitlines()), "")
    return f"{type(failure).__name__}: {reason}" if reason else type(failure).__name__
