"""A page about the memory of a training step: one HTML file that loads nothing."""

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from optimum_memopt.engines.step_timeline import StepTimeline
from optimum_memopt.errors import MemOptError, path_excerpt
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.report import charts
from optimum_memopt.report.data import ReportData, sizes_text
from optimum_memopt.report.words import paragraph
from optimum_memopt.sizes import gib_text

_TEMPLATE = "page.html.jinja"
# Groups at the peak that are worth a row, and how many at the most.
_SMALLEST_SHARE, _MOST_GROUPS = 0.001, 14


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        html: all of it.
    """

    html: str

    def save(self, path: os.PathLike | str) -> None:
        """Write it.

        Raises:
            MemOptError: the file cannot be written.
        """
        try:
            Path(path).write_text(self.html, encoding="utf-8")
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
    return Page(template.render(data=data, text=paragraph(data), pictures=pictures, **_values(data)))


def _pictures(data: ReportData) -> dict[str, str]:
    """By name, those for which there is something to show."""
    found = {}
    if data.timeline is not None:
        found["timeline"] = charts.timeline_svg(data.timeline)
    if data.timeline is not None or data.measured is not None:
        found["phases"] = charts.phases_svg(data.timeline, data.measured)
    if data.frontier is not None and data.frontier.points:
        found["frontier"] = charts.frontier_svg(data.frontier)
    if data.densities:
        found["density"] = charts.density_svg(data.densities)
    return found


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
    """Of the batch; a timeline of fixed sizes has no names for them."""
    if data.timeline is not None and data.timeline.sizes:
        return data.timeline.sizes
    return data.table.symbols if data.table is not None else {}


def _room(data: ReportData) -> int:
    """Bytes that the plan takes more on the curve than on the timeline: a budget leaves room for a process to grow."""
    if data.timeline is None or data.frontier is None or data.frontier.chosen is None:
        return 0
    return max(0, data.frontier.chosen.peak - data.timeline.peak)


def at_peak(timeline: StepTimeline) -> list[Mapping[str, Any]]:
    """What is held at the peak, largest first; the last row sums up what is small."""
    groups = [group for group in timeline.alive if group.bytes >= _SMALLEST_SHARE * timeline.peak][:_MOST_GROUPS]
    found: list[Mapping[str, Any]] = [
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
        found.append(row)
    return found


def _where(layers: tuple[str, ...]) -> str:
    if len(layers) < 2:
        return "".join(layers)
    return f"{len(layers)} layers"


def rows(table: PlanTable) -> list[Mapping[str, Any]]:
    """The plan table's rows, each with the length of its bar."""
    largest = max((plan.saving_bytes or 0 for plan in table.plans), default=0) or 1
    return [{"plan": plan, "share": (plan.saving_bytes or 0) / largest} for plan in table.plans]


def phases(data: ReportData) -> list[Mapping[str, Any]]:
    """What is held at the borders of the step's phases and the peaks between them, in bytes."""
    predicted = {phase.name: phase for phase in data.timeline.phases} if data.timeline is not None else {}
    seen = {phase.name: phase for phase in data.measured.phases} if data.measured is not None else {}
    return [
        {"name": name.replace("_", " "), "predicted": predicted.get(name), "measured": _in_bytes(seen.get(name))}
        for name in predicted or seen
    ]


def _in_bytes(phase: Any) -> Mapping[str, int] | None:
    return None if phase is None else {"held": round(phase.held * 2**20), "peak": round(phase.peak * 2**20)}
