"""The page about a training step, and the report that writes it when a run is over."""

import html
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from transformers import Trainer

from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.api.predictions import GRADIENTS, OPTIMIZER, PARAMETERS, SAVED, StepTimeline
from optimum_memopt.errors import MemOptError, line_of, path_excerpt
from optimum_memopt.logs import get_logger
from optimum_memopt.option_values import check_drawing
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.report import charts
from optimum_memopt.report.data import CollectingCallback, ReportData, of_training, sizes_text
from optimum_memopt.report.snapshot import measured_snapshot, predicted_snapshot
from optimum_memopt.sizes import gib_text


def paragraph(data: ReportData) -> str:
    """The page in a few sentences."""
    return " ".join(
        (
            *_outcome(data),
            *(_predicted(data.timeline) if data.timeline is not None else ()),
            *_measured(data),
            *_plans(data),
            *_costs(data),
        )
    )


def _outcome(data: ReportData) -> Iterator[str]:
    if data.failure:
        yield f"Training stopped with {data.failure.rstrip('.')}."
    if data.table is None:
        yield "No training step has run, so there is no plan table."


def _predicted(timeline: StepTimeline) -> Iterator[str]:
    peak, at = timeline.peak, timeline.peak_at
    if timeline.peak_phase == "optimizer":
        where = "in the optimizer's step"
    else:
        layer = f" of {timeline.layers[at]}" if timeline.layers[at] else ""
        where = f"in the {timeline.peak_phase}, at {timeline.operators[at]}{layer}"
    yield f"The step is predicted to peak at {gib_text(peak)}, {where}."
    held = {name: sizes[at] for name, sizes in timeline.held.items()}
    model = held[PARAMETERS] + held[GRADIENTS] + held[OPTIMIZER]
    yield (
        f"{gib_text(model)} of it are parameters, gradients and optimizer states, {gib_text(held[SAVED])} saved "
        f"activations ({held[SAVED] / peak:.0%}); {gib_text(held['other'])} are held beside the step by the process."
    )


def _measured(data: ReportData) -> Iterator[str]:
    if not data.measured_peak:
        return
    beside = f", {data.measured_peak / data.timeline.peak:.1%} of the prediction" if data.timeline is not None else ""
    yield f"Measured: {gib_text(data.measured_peak)} {data.measures}{beside}."


def _plans(data: ReportData) -> Iterator[str]:
    if data.table is None or not data.table.plans:
        return
    table = data.table
    saving = gib_text(table.claimed_saving_bytes)
    if table.enabled:
        yield (
            f"{len(table.enabled)} of {len(table.plans)} plans are on and free {saving} of saved activations, a sum "
            "over tensors of different moments, so the peak falls by less."
        )
    else:
        yield f"None of the {len(table.plans)} plans is on."
    off = [plan for plan in table.plans if not plan.is_on and plan.saving_bytes]
    if off:
        largest = max(off, key=lambda plan: plan.saving_bytes or 0)
        yield f"The largest that is off, {largest.config}, would free {gib_text(largest.saving_bytes or 0)}."


def _costs(data: ReportData) -> Iterator[str]:
    frontier = data.frontier
    if frontier is None or not frontier.points:
        return
    lowest, highest = frontier.points[0], frontier.points[-1]
    if frontier.chosen is not None:
        yield f"The plan takes {frontier.chosen.extra_time:+.1%} time ({frontier.costs} costs)."
    yield (
        f"Budgets from {gib_text(lowest.peak)} ({lowest.extra_time:+.1%} time) to {gib_text(highest.peak)} "
        f"({highest.extra_time:+.1%}) are possible with this batch."
    )


_TEMPLATE = "page.html.jinja"
# Groups at the peak that are worth a row, and how many at the most.
_SMALLEST_SHARE, _MOST_GROUPS = 0.001, 14


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        snapshots: pickles of the step for PyTorch's memory viewer, by name: `predicted`, `measured`.
    """

    html: str
    snapshots: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def save(self, path: os.PathLike | str) -> None:
        """Write it, and beside `page.html` the snapshots as `page.predicted.pickle` and `page.measured.pickle`.

        Raises:
            MemOptError: a file cannot be written.
        """
        try:
            Path(path).write_text(self.html, encoding="utf-8")
            for name, snapshot in self.snapshots.items():
                Path(path).with_suffix(f".{name}.pickle").write_bytes(snapshot)
        # TypeError: no path.
        except (OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise MemOptError(f"report {path_excerpt(path)}: not written: {reason}") from error

    def _repr_html_(self) -> str:
        """In a notebook; in a frame, so that its style is not the notebook's."""
        return f'<iframe srcdoc="{html.escape(self.html)}" width="100%" height="800" style="border: 0"></iframe>'


def render(data: ReportData) -> Page:
    """The page that shows `data`.

    Raises:
        ImportError: matplotlib or jinja2 is missing; `option_values.check_page` says so in time.
    """
    import jinja2

    source = resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["size"] = gib_text
    template = environment.from_string(source)
    pictures = {name: jinja2.filters.Markup(text) for name, text in _pictures(data).items()}
    snapshots = _snapshots(data)
    values = {"text": paragraph(data), "pictures": pictures, "snapshots": tuple(snapshots), **_values(data)}
    return Page(template.render(data=data, **values), snapshots)


def _snapshots(data: ReportData) -> dict[str, bytes]:
    snapshots = {}
    if data.timeline is not None:
        snapshots["predicted"] = predicted_snapshot(data.timeline)
    if data.measured is not None:
        snapshots["measured"] = measured_snapshot(data.measured)
    return snapshots


def _pictures(data: ReportData) -> dict[str, str]:
    """By name, those for which there is something to show."""
    pictures = {}
    if data.timeline is not None:
        pictures["timeline"] = charts.timeline_svg(data.timeline)
    if data.timeline is not None or data.measured is not None:
        pictures["phases"] = charts.phases_svg(data.timeline, data.measured)
    if data.frontier is not None and data.frontier.points:
        pictures["frontier"] = charts.frontier_svg(data.frontier)
    if data.densities:
        pictures["density"] = charts.density_svg(data.densities)
    return pictures


def _values(data: ReportData) -> dict[str, Any]:
    return {
        "legend": charts.shown_categories(data.timeline) if data.timeline is not None else (),
        "at_peak": at_peak(data.timeline) if data.timeline is not None else (),
        "rows": rows(data.table) if data.table is not None else (),
        "has_formulas": data.table is not None and any(plan.saving_symbolic for plan in data.table.plans),
        "has_notes": data.table is not None and any(plan.note for plan in data.table.plans),
        "phases": phases(data),
        "batch": sizes_text(_sizes(data)),
        "room": _room(data),
        "first_batch": sizes_text(data.table.symbols) if data.table is not None else "",
    }


def _sizes(data: ReportData) -> Mapping[str, int]:
    """Sizes of the batch; a timeline of fixed sizes has no names for them."""
    if data.timeline is not None and data.timeline.sizes:
        return data.timeline.sizes
    return data.table.symbols if data.table is not None else {}


def _room(data: ReportData) -> int:
    """Bytes that the plan takes more on the curve than on the timeline: a budget leaves room for a process to grow."""
    if data.timeline is None or data.frontier is None or data.frontier.chosen is None:
        return 0
    return max(0, data.frontier.chosen.peak - data.timeline.peak)


def at_peak(timeline: StepTimeline) -> list[Mapping[str, Any]]:
    """Groups of tensors at the peak, largest first; the last row sums up what is small."""
    groups = [group for group in timeline.alive if group.bytes >= _SMALLEST_SHARE * timeline.peak][:_MOST_GROUPS]
    listed: list[Mapping[str, Any]] = [
        {
            "category": group.category,
            "name": group.name,
            "count": group.count,
            "where": _where(group.layers),
            "bytes": group.bytes,
            "share": group.bytes / timeline.peak,
        }
        for group in groups
    ]
    if rest := timeline.peak - sum(group.bytes for group in groups):
        row = {"category": "", "name": "", "count": 0, "where": "", "bytes": rest, "share": rest / timeline.peak}
        listed.append(row)
    return listed


def _where(layers: tuple[str, ...]) -> str:
    if len(layers) < 2:
        return "".join(layers)
    return f"{len(layers)} layers"


def rows(table: PlanTable) -> list[Mapping[str, Any]]:
    """The plan table's rows, each with the length of its bar."""
    largest = max((plan.saving_bytes or 0 for plan in table.plans), default=0) or 1
    return [{"plan": plan, "share": (plan.saving_bytes or 0) / largest} for plan in table.plans]


def phases(data: ReportData) -> list[Mapping[str, Any]]:
    """Bytes at the borders of the step's phases and the peaks between them."""
    predicted = {phase.name: phase for phase in data.timeline.phases} if data.timeline is not None else {}
    seen = {phase.name: phase for phase in data.measured.phases} if data.measured is not None else {}
    return [
        {"name": name.replace("_", " "), "predicted": predicted.get(name), "measured": _in_bytes(seen.get(name))}
        for name in predicted or seen
    ]


def _in_bytes(phase: Any) -> Mapping[str, int] | None:
    return None if phase is None else {"held": round(phase.held * 2**20), "peak": round(phase.peak * 2**20)}


class TrainingReport:
    """Makes the page about one Trainer's runs."""

    def __init__(
        self, trainer: Trainer, engine: Engine, plan_stats: PlanStatsCallback, collected: CollectingCallback
    ) -> None:
        # The Trainer owns this.
        self._trainer = weakref.ref(trainer)
        self._engine, self._plan_stats, self._collected = engine, plan_stats, collected

    def page(self, path: os.PathLike | str | None = None, failure: str = "") -> Page:
        """The page about the last run, or the one that is under way.

        Raises:
            MemOptError: matplotlib or jinja2 is missing, or the file cannot be written.
        """
        check_drawing("report")
        trainer = self._trainer()
        if trainer is None:
            raise MemOptError("report: the Trainer is gone")
        page = render(of_training(trainer, self._engine, self._plan_stats, self._collected, failure))
        if path is not None:
            page.save(path)
        return page

    def write(self, path: os.PathLike | str, failure: str) -> None:
        """`page` at the end of a run, on the world's rank 0; what goes wrong is a warning, since the run is over.

        Args:
            failure: see `failure_text`; empty: the run ended by itself.
        """
        trainer = self._trainer()
        if trainer is None or not trainer.is_world_process_zero():
            return
        try:
            self.page(path, failure)
        except Exception as error:
            get_logger().warning(f"the report was not written ({line_of(error)})")
        else:
            get_logger().info(f"wrote the report about this run to {path}")
