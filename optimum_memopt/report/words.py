"""The page in a paragraph. Pure."""

from collections.abc import Iterator

from optimum_memopt.engines.step_timeline import GRADIENTS, OPTIMIZER, PARAMETERS, SAVED, StepTimeline
from optimum_memopt.report.data import ReportData
from optimum_memopt.sizes import gib_text


def paragraph(data: ReportData) -> str:
    """What the page says, in a few sentences."""
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
