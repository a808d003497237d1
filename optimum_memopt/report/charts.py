"""The pictures of a page about a training step, by matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from optimum_memopt.engines.estimates import Frontier
from optimum_memopt.engines.step_timeline import CATEGORIES, OTHER, StepTimeline
from optimum_memopt.report.spans import columns_of, layer_spans, short_names
from optimum_memopt.report.svg import (
    BACK,
    GRID,
    MARK,
    MEASURED,
    MUTED,
    OF_CATEGORY,
    OF_LINE,
    PREDICTED,
    TEXT,
    figure,
    svg_of,
)
from optimum_memopt.sizes import gib_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    # With transformers' Trainer and PEFT behind it, for seconds that `plan` needs not.
    from optimum_memopt.callbacks.collected import MeasuredStep

WIDTH = 9.0
_COLUMNS = 240
# Of the width: the optimizer's step, which is one operator, and the least between the labels of two layers.
_OPTIMIZER, _APART = 0.08, 0.022
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def unit_of(size: float) -> tuple[str, int]:
    """The largest unit of which there is at least one."""
    return next(((name, count) for name, count in _UNITS if size >= count), _UNITS[-1])


def shown_categories(timeline: StepTimeline) -> tuple[str, ...]:
    """What a picture of the step shows, from the bottom up: not the process, where it would hide the rest."""
    peak = timeline.peak
    hidden = {OTHER} if max(timeline.held[OTHER]) > peak / 2 else set()
    return tuple(name for name in CATEGORIES if name not in hidden and any(timeline.held[name]))


def timeline_svg(timeline: StepTimeline) -> str:
    """Bytes by category over operators, with layers and the peak."""
    shown = shown_categories(timeline)
    beside = 0 if OTHER in shown else max(timeline.held[OTHER])
    unit, count = unit_of(timeline.peak - beside)
    with figure("timeline", WIDTH, 3.9) as drawn:
        axes = drawn.subplots()
        place = _Places(timeline)
        heights = [sum(timeline.held[name][index] for name in shown) for index in range(len(timeline.operators))]
        low = [0.0] * len(place.picked)
        for name in shown:
            high = [base + timeline.held[name][index] / count for base, index in zip(low, place.picked, strict=True)]
            if any(top > base for top, base in zip(high, low, strict=True)):
                axes.stairs(high, place.edges, baseline=low, fill=True, color=OF_CATEGORY[name], linewidth=0)
            low = high
        top = max(heights) / count
        axes.set_ylim(0, 1.24 * top)
        axes.set_xlim(0, 1)
        _mark_layers(axes, timeline, place)
        _mark_peak(axes, timeline, place, heights[timeline.peak_at] / count, shows_process=not beside)
        for border in (place(timeline.backward_at), 1 - _OPTIMIZER):
            axes.axvline(border, color=MUTED, linewidth=0.8)
        middle = place(timeline.backward_at)
        axes.set_xticks(
            [middle / 2, (middle + 1 - _OPTIMIZER) / 2, 1 - _OPTIMIZER / 2], ["forward", "backward", "optimizer"]
        )
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(f"{unit} held" if not beside else f"{unit} held beside the process")
        axes.grid(axis="y", linewidth=0.6)
        return svg_of(drawn, f"Memory of a training step over its operators, peak {gib_text(timeline.peak)}")


class _Places:
    """Where operators are on an axis from 0 to 1.

    Attributes:
        picked: operators whose bytes are drawn.
        edges: of their columns, one more.
    """

    def __init__(self, timeline: StepTimeline) -> None:
        self._last = timeline.optimizer_at
        found = columns_of(timeline, _COLUMNS)
        self.picked = [*(index for _, index in found), self._last]
        self.edges = [*(self(begin) for begin, _ in found), 1 - _OPTIMIZER, 1.0]

    def __call__(self, index: float) -> float:
        """Of the beginning of an operator."""
        return (1 - _OPTIMIZER) * index / max(1, self._last)


def _mark_layers(axes: "Axes", timeline: StepTimeline, place: _Places) -> None:
    """Bands behind the layers, and the names of as many as there is room for."""
    spans = layer_spans(timeline.layers, timeline.backward_at)
    names = short_names([span.name for span in spans])
    last = -1.0
    for number, span in enumerate(spans):
        begin, end = place(span.begin), place(span.end)
        if number % 2 == 0:
            axes.axvspan(begin, end, color=GRID, alpha=0.45, linewidth=0, zorder=0)
        middle, name = (begin + end) / 2, names[span.name]
        # A name of two letters is half as wide as one of four.
        room = _APART * max(1.0, len(name) / 2)
        if middle - last >= room:
            axes.annotate(
                name, (middle, 0.985), xycoords=("data", "axes fraction"), ha="center", va="top", color=MUTED, size=8
            )
            last = middle


def _mark_peak(axes: "Axes", timeline: StepTimeline, place: _Places, height: float, shows_process: bool) -> None:
    at = timeline.peak_at
    x = place(at + 0.5) if at < timeline.optimizer_at else 1 - _OPTIMIZER / 2
    is_right = x > 0.55
    label = f"peak {gib_text(timeline.peak)}{'' if shows_process else ' with the process'}"
    axes.plot([x], [height], marker="v", color=MARK, markersize=7, zorder=5, clip_on=False)
    axes.annotate(
        label,
        (x, height),
        xytext=(-8 if is_right else 8, 4),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="bottom",
        color=TEXT,
        weight="bold",
    )


def phases_svg(timeline: StepTimeline | None, measured: "MeasuredStep | None") -> str:
    """Peaks of the phases, predicted beside measured."""
    predicted = {phase.name: phase.peak for phase in timeline.phases} if timeline is not None else {}
    seen = {phase.name: round(phase.peak * 2**20) for phase in measured.phases} if measured is not None else {}
    names = list(predicted or seen)
    kinds = [(values, colour) for values, colour in ((predicted, PREDICTED), (seen, MEASURED)) if values]
    largest = max(size for values, _ in kinds for size in values.values())
    unit, count = unit_of(largest)
    with figure("phases", WIDTH, 0.6 + 0.3 * len(names) * len(kinds)) as drawn:
        axes = drawn.subplots()
        thick = 0.8 / len(kinds)
        for number, (values, colour) in enumerate(kinds):
            shift = (number - (len(kinds) - 1) / 2) * thick
            rows = [index + shift for index, name in enumerate(names) if name in values]
            sizes = [values[name] for name in names if name in values]
            axes.barh(rows, [size / count for size in sizes], height=0.9 * thick, color=colour)
            for row, size in zip(rows, sizes, strict=True):
                axes.annotate(
                    gib_text(size), (size / count, row), xytext=(4, 0), textcoords="offset points", va="center", size=9
                )
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.13 * largest / count)
        axes.set_xlabel(f"most {unit} since the phase before")
        axes.grid(axis="x", linewidth=0.6)
        return svg_of(drawn, "Peak of each phase of a step, predicted and measured")


def frontier_svg(frontier: Frontier) -> str:
    """Extra time over the peak, with the plan in force."""
    with figure("frontier", WIDTH, 3.2) as drawn:
        axes = drawn.subplots()
        draw_frontier(axes, frontier, OF_LINE[0])
        chosen = frontier.chosen
        if chosen is not None:
            _, count = unit_of(frontier.points[-1].peak)
            x, y = chosen.peak / count, 100 * chosen.extra_time
            axes.plot([x], [y], marker="o", markersize=10, color=MARK, zorder=5, clip_on=False)
            axes.set_ylim(top=max(axes.get_ylim()[1], 1.25 * y))
            low, high = axes.get_xlim()
            is_right = x > (low + high) / 2
            axes.annotate(
                f"this plan: {chosen.extra_time:+.1%} time",
                (x, y),
                annotation_clip=False,
                xytext=(-10 if is_right else 10, 10),
                textcoords="offset points",
                ha="right" if is_right else "left",
                weight="bold",
                bbox={"facecolor": BACK, "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
            )
        return svg_of(drawn, "Extra time of a step over its predicted peak")


def draw_frontier(axes: "Axes", frontier: Frontier, colour: str = "C0") -> None:
    """The curve of `frontier_svg` alone."""
    unit, count = unit_of(frontier.points[-1].peak)
    peaks = [point.peak / count for point in frontier.points]
    times = [100 * point.extra_time for point in frontier.points]
    axes.plot(peaks, times, marker="o", markersize=4, drawstyle="steps-post", color=colour)
    axes.set_xlabel(f"predicted peak of a step, {unit}")
    axes.set_ylabel(f"extra time, % ({frontier.costs} costs)")
    axes.set_ylim(0, max(1.0, 1.25 * max(times)))
    axes.grid(linewidth=0.6)


def density_svg(densities: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Percent of each input that is not padding, over steps."""
    from matplotlib.ticker import MaxNLocator

    with figure("density", WIDTH, 2.6) as drawn:
        axes = drawn.subplots()
        for number, (name, points) in enumerate(densities.items()):
            steps, percents = zip(*points, strict=True)
            axes.plot(steps, percents, marker=".", color=OF_LINE[number % len(OF_LINE)], label=name)
        axes.set_ylim(0, 105)
        axes.set_xlabel("step")
        axes.set_ylabel("no padding, %")
        axes.grid(linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        drawn.legend(frameon=False, loc="outside upper left", ncols=4)
        return svg_of(drawn, "Share of tokens that are no padding, over steps")
