"""The page about a training step: the numbers of a run or a prediction, in sentences, tables and charts."""

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import Trainer

from optimum_memopt.cache_files import write_file
from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MeasuredStep, MemoryPhasesCallback
from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.callbacks.reporting import callback_of
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.predictions import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    SAVED,
    Frontier,
    Group,
    Phase,
    StepEstimate,
    StepTimeline,
    Way,
)
from optimum_memopt.errors import excerpt, line_of, writing
from optimum_memopt.logs import best_effort, get_logger
from optimum_memopt.option_values import check_drawing
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.report import charts
from optimum_memopt.report.snapshot import measured_snapshot, predicted_snapshot
from optimum_memopt.sizes import MIB, gib_text


@dataclass(frozen=True)
class ReportData:
    """The page's data about a training step; sizes are bytes.

    Attributes:
        title: title of the page, such as the plan or the model's class.
        facts: names and values, such as `engine` and `compile`.
        failure: the error that ended the run; empty if it did not fail.
        table: the plan table; None if no step has run.
        timeline: the predicted step, operator by operator; None without a prediction.
        frontier: the time-memory frontier; None if not requested.
        measured: phases of the measured step with the highest peak; None without `--log_memory_phases`.
        measured_peak: measured peak of the run; 0 if nothing has run.
        measures: the measured memory: `resident` or `allocated`.
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
    """Returns the data of a predicted step of plain PyTorch."""
    sizes = way.timeline.sizes if way.timeline is not None else {}
    return ReportData(
        title=f"A step of {way.plan.name}",
        facts=(("model", excerpt(model)), ("batch", sizes_text(sizes))),
        timeline=way.timeline,
    )


def of_estimate(estimate: StepEstimate, model: str) -> ReportData:
    """Returns the data of a predicted step."""
    table = estimate.table
    facts = (("model", excerpt(model)), ("batch", sizes_text(table.symbols)))
    title = (table.header or ("Training step",))[0]
    return ReportData(title, facts, table=table, timeline=estimate.timeline, frontier=estimate.frontier)


def of_training(trainer: Trainer, engine: Engine, failure: str) -> ReportData:
    """Returns the data of a current or finished run; `engine` is or was attached to its model."""
    table, plan_stats = engine.plans(), callback_of(trainer, PlanStatsCallback)
    phases, density = callback_of(trainer, MemoryPhasesCallback), callback_of(trainer, InputDensityCallback)
    timeline = None
    with best_effort("the step's timeline"):
        timeline = engine.timeline(trainer.optimizer)
    return ReportData(
        title=table.header[0] if table is not None and table.header else type(trainer.model).__name__,
        facts=_facts(trainer, engine, plan_stats),
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
    """Returns sizes as text: `inputs_input_ids_dim0=16, inputs_input_ids_dim1=111`."""
    return ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))


def _facts(trainer: Trainer, engine: Engine, plan_stats: PlanStatsCallback | None) -> tuple[tuple[str, str], ...]:
    args, state = trainer.args, trainer.state
    # The arguments have been restored after a run whose micro-batch was chosen.
    rows, accumulation = (0, 0) if plan_stats is None else plan_stats.micro_batch
    accumulation = accumulation or args.gradient_accumulation_steps
    batch = f"{rows or args.per_device_train_batch_size} rows"
    if accumulation > 1:
        batch += f", {accumulation} accumulated"
    if args.world_size > 1:
        batch += f", on {args.world_size} processes; this page shows rank 0"
    return (
        ("engine", f"{engine.name} ({engine.reason})"),
        ("model", type(trainer.model).__name__),
        ("micro-batch", batch),
        ("optimizer steps", f"{state.global_step} of {state.max_steps}"),
        ("mixed precision", "bf16" if args.bf16 else "fp16" if args.fp16 else "no"),
    )


def paragraph(data: ReportData) -> str:
    """Returns a summary of the page in a few sentences."""
    return " ".join(_sentences(data))


def _sentences(data: ReportData) -> Iterator[str]:
    if data.failure:
        yield f"Training stopped with {data.failure.rstrip('.')}."
    if data.table is None and data.timeline is None:
        yield "No training step has run, so there is no plan table."
    if data.timeline is not None:
        yield from _predicted(data.timeline)
    if data.measured_peak:
        share = (
            f", {data.measured_peak / data.timeline.peak:.1%} of the prediction" if data.timeline is not None else ""
        )
        yield f"Measured: {gib_text(data.measured_peak)} {data.measures}{share}."
    if data.table is not None and data.table.plans:
        yield from _plans(data.table)
    if data.frontier is not None and data.frontier.points:
        yield from _costs(data.frontier)


def _predicted(timeline: StepTimeline) -> Iterator[str]:
    peak, at = timeline.peak, timeline.peak_at
    where = "in the optimizer's step" if timeline.peak_phase == "optimizer" else timeline.peak_place
    yield f"The step is predicted to peak at {gib_text(peak)}, {where}."
    held = {name: sizes[at] for name, sizes in timeline.held.items()}
    model = held[PARAMETERS] + held[GRADIENTS] + held[OPTIMIZER]
    yield (
        f"{gib_text(model)} of it are parameters, gradients and optimizer states, {gib_text(held[SAVED])} saved "
        f"activations ({held[SAVED] / peak:.0%}); the process holds {gib_text(held['other'])} outside of the step."
    )


def _plans(table: PlanTable) -> Iterator[str]:
    saving = gib_text(table.claimed_saving_bytes)
    if table.enabled:
        yield (
            f"{len(table.enabled)} of {len(table.plans)} plans are on and free {saving} of saved activations. Not all "
            "of these are alive at once, so the peak falls by less."
        )
    else:
        yield f"None of the {len(table.plans)} plans is on."
    if off := [(plan.saving_bytes, plan.config) for plan in table.plans if not plan.is_on and plan.saving_bytes]:
        size, config = max(off, key=lambda each: each[0])
        yield f"The largest plan that is off, {config}, would free {gib_text(size)}."


def _costs(frontier: Frontier) -> Iterator[str]:
    lowest, highest = frontier.points[0], frontier.points[-1]
    if frontier.chosen is not None:
        yield f"The plan adds {frontier.chosen.extra_time:+.1%} time ({frontier.costs} costs)."
    yield (
        f"Budgets from {gib_text(lowest.peak)} ({lowest.extra_time:+.1%} time) to {gib_text(highest.peak)} "
        f"({highest.extra_time:+.1%}) are possible with this batch."
    )


# Smallest share of the peak for which a group gets a row, and the maximum number of rows.
_SMALLEST_SHARE, _MOST_GROUPS = 0.001, 14


@dataclass(frozen=True)
class Page:
    """A page about a training step.

    Attributes:
        snapshots: pickles of the step for PyTorch's memory viewer, by name: `predicted`, `measured`.
    """

    html: str
    snapshots: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def save(self, path: os.PathLike | str) -> None:
        """Write the page, and next to `page.html` the snapshots `page.predicted.pickle` and `page.measured.pickle`.

        Raises:
            MemOptError: a file cannot be written.
        """
        with writing("report", path):
            write_file(path, self.html.encode())
            for name, snapshot in self.snapshots.items():
                write_file(Path(path).with_suffix(f".{name}.pickle"), snapshot)

    def _repr_html_(self) -> str:
        """Returns the page in a frame for notebooks, so that it does not inherit the notebook's style."""
        return f'<iframe srcdoc="{html.escape(self.html)}" width="100%" height="800" style="border: 0"></iframe>'


def render(data: ReportData) -> Page:
    """Returns the page that shows `data`.

    Raises:
        ImportError: matplotlib or jinja2 is missing; `option_values.check_page` detects this earlier.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("optimum_memopt", "report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"size": gib_text, "sizes": sizes_text}
    timeline, pictures, snapshots = data.timeline, {}, {}
    predicted = timeline.phases if timeline is not None else ()
    measured = data.measured.phases if data.measured is not None else ()
    if timeline is not None:
        pictures["timeline"] = charts.timeline_svg(timeline)
        snapshots["predicted"] = predicted_snapshot(timeline)
    if data.measured is not None:
        snapshots["measured"] = measured_snapshot(data.measured)
    if predicted or measured:
        pictures["phases"] = charts.phases_svg(predicted, measured)
    if data.frontier is not None and data.frontier.points:
        pictures["frontier"] = charts.frontier_svg(data.frontier)
    if data.densities:
        pictures["density"] = charts.density_svg(data.densities)
    text = environment.get_template("page.html.jinja").render(
        data=data,
        text=paragraph(data),
        pictures=pictures,
        snapshots=snapshots,
        legend=charts.shown_categories(timeline) if timeline is not None else (),
        at_peak=at_peak(timeline) if timeline is not None else (),
        phases=_beside(predicted, measured),
        room=_room(data),
    )
    return Page(text, snapshots)


def _room(data: ReportData) -> int:
    """Returns the bytes by which the plan's peak on the curve exceeds the timeline's: a budget leaves room for the
    process to grow."""
    if data.timeline is None or data.frontier is None or data.frontier.chosen is None:
        return 0
    return max(0, data.frontier.chosen.peak - data.timeline.peak)


def at_peak(timeline: StepTimeline) -> list[Group]:
    """Returns the tensor groups at the peak, largest first; the last group, without a category, sums up the small
    ones."""
    groups = [group for group in timeline.alive if group.bytes >= _SMALLEST_SHARE * timeline.peak][:_MOST_GROUPS]
    rest = timeline.peak - sum(group.bytes for group in groups)
    return [*groups, Group("", "", 0, rest)] if rest else groups


def _beside(predicted: Sequence[Phase], measured: Sequence[Phase]) -> list[tuple[str, Phase | None, Phase | None]]:
    """Returns each phase's name, prediction and measurement; None if it is not predicted or not measured."""
    of_prediction, of_run = ({phase.name: phase for phase in phases} for phases in (predicted, measured))
    return [(name.replace("_", " "), of_prediction.get(name), of_run.get(name)) for name in of_prediction or of_run]


def training_page(trainer: Trainer, engine: Engine, path: os.PathLike | str | None = None, failure: str = "") -> Page:
    """Returns the page about a Trainer's last or current run.

    Args:
        path: file to write the page to; None: no file.
        failure: the error that ended the run, see `line_of`; empty: no error.

    Raises:
        MemOptError: matplotlib or jinja2 is missing, or the file cannot be written.
    """
    check_drawing("report")
    page = render(of_training(trainer, engine, failure))
    if path is not None:
        page.save(path)
    return page


def write_training_page(trainer: Trainer, engine: Engine, path: os.PathLike | str, failure: str) -> None:
    """Write `training_page` at the end of a run, on global rank 0; errors are logged as warnings, since the run is
    over."""
    if not trainer.is_world_process_zero():
        return
    try:
        training_page(trainer, engine, path, failure)
    except Exception as error:
        get_logger().warning(f"could not write the report ({line_of(error)})")
    else:
        get_logger().info(f"wrote the report on this run to {path}")
