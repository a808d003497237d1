"""Matplotlib charts as SVG elements of a page, whose style sheet sets their colours."""

import html
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_memopt.engines.api.predictions import CATEGORIES, OTHER, Frontier, Phase, StepTimeline
from optimum_memopt.errors import MemOptError, path_excerpt, writing
from optimum_memopt.option_values import check_drawing
from optimum_memopt.sizes import gib_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Placeholder colours for matplotlib, each replaced by a variable of the style sheet.
TEXT, MUTED, GRID, PREDICTED, MEASURED, MARK, BACK = (f"#01010{number}" for number in range(1, 8))
OF_CATEGORY = {name: f"#0202{number:02x}" for number, name in enumerate(CATEGORIES)}
# Colours of lines without a fixed meaning.
OF_LINE = tuple(OF_CATEGORY[name] for name in ("parameters", "gradients", "saved activations", "temporaries"))
_VARIABLES = {
    TEXT: "currentColor",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PREDICTED: "var(--predicted)",
    MEASURED: "var(--measured)",
    MARK: "var(--mark)",
    BACK: "var(--back)",
    **{colour: f"var(--{name.replace(' ', '-')})" for name, colour in OF_CATEGORY.items()},
}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "text.color": TEXT,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "grid.color": GRID,
    "axes.axisbelow": True,
}


@contextmanager
def figure(name: str, height: float) -> Iterator["Figure"]:
    """Yields a figure for `svg_of`; `height` is in inches, and charts of one page have different names."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def svg_of(drawn: "Figure", description: str) -> str:
    """Returns a figure as an SVG element of a page, with a description for screen readers."""
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    # Use the page's font; remove group ids, which repeat in every chart; round paths to a tenth of a point.
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), text)
    size = re.search(r'viewBox="[^"]*"', text)
    assert size is not None
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {size[0]} role="img">'
    return f"{head}<title>{html.escape(description)}</title>{text[text.index('>') + 1 :]}"


@dataclass(frozen=True)
class Span:
    """Consecutive operators of the layer `name`; `end` is the index after the last."""

    name: str
    begin: int
    end: int


def layer_spans(layers: Sequence[str], border: int) -> list[Span]:
    """Returns spans of operators of one layer, including operators of no layer between them; none crosses the border.

    Args:
        layers: the layer of each operator, empty outside of layers.
        border: index of the backward's first operator.
    """
    inside = (index for index, layer in enumerate(layers) if layer)
    runs = itertools.groupby(inside, key=lambda index: (layers[index], index >= border))
    spans = []
    for (name, _), run in runs:
        indices = list(run)
        spans.append(Span(name, indices[0], indices[-1] + 1))
    return spans


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Returns a short label for each layer path: its number, if all numbers differ, else the path."""
    numbers = {path: path.rpartition(".")[2] for path in paths}
    return numbers if len(set(numbers.values())) == len(set(paths)) else {path: path for path in paths}


def columns(total: Sequence[int], begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Returns at most `most` spans of the operators from `begin` to `end`: each span's first operator, and the one
    that holds the most bytes."""
    count = min(most, end - begin)
    edges = [begin + (end - begin) * number // count for number in range(count + 1)] if count else []
    return [(low, max(range(low, high), key=total.__getitem__)) for low, high in itertools.pairwise(edges)]


WIDTH = 9.0
_COLUMNS = 240
# Shares of the width: that of the optimizer's step, which is one operator, and the minimum between two layer labels.
_OPTIMIZER, _APART = 0.08, 0.022
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def unit_of(size: float) -> tuple[str, int]:
    """Returns the largest unit that is not larger than `size`, with its bytes."""
    return next(((name, count) for name, count in _UNITS if size >= count), _UNITS[-1])


def shown_categories(timeline: StepTimeline) -> tuple[str, ...]:
    """Returns the categories in a chart of the step, from the bottom up; omits the process if it would dwarf the
    rest."""
    peak = timeline.peak
    hidden = {OTHER} if max(timeline.held[OTHER]) > peak / 2 else set()
    return tuple(name for name in CATEGORIES if name not in hidden and any(timeline.held[name]))


def timeline_svg(timeline: StepTimeline) -> str:
    """Returns a chart of bytes by category over operators, with layers and the peak."""
    shown = shown_categories(timeline)
    beside = 0 if OTHER in shown else max(timeline.held[OTHER])
    unit, count = unit_of(timeline.peak - beside)
    with figure("timeline", 3.9) as drawn:
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
        middle, last = place(timeline.backward_at), 1 - _OPTIMIZER
        for border in (middle, last):
            axes.axvline(border, color=MUTED, linewidth=0.8)
        axes.set_xticks([middle / 2, (middle + last) / 2, (last + 1) / 2], ["forward", "backward", "optimizer"])
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(f"{unit} held" if not beside else f"{unit} held, without the process")
        axes.grid(axis="y", linewidth=0.6)
        return svg_of(drawn, f"Memory of a training step over its operators, peak {gib_text(timeline.peak)}")


class _Places:
    """Positions of operators on an axis from 0 to 1.

    Attributes:
        picked: indices of the operators whose bytes are drawn.
        edges: edges of their columns, one more than columns.
    """

    def __init__(self, timeline: StepTimeline) -> None:
        self._last = timeline.optimizer_at
        # Forward and backward have separate columns, so that the highest of the timeline is one of them.
        border = timeline.backward_at
        forward = columns(timeline.total, 0, border, max(1, round(_COLUMNS * border / max(1, self._last))))
        picked = forward + columns(timeline.total, border, self._last, max(1, _COLUMNS - len(forward)))
        self.picked = [*(index for _, index in picked), self._last]
        self.edges = [*(self(begin) for begin, _ in picked), 1 - _OPTIMIZER, 1.0]

    def __call__(self, index: float) -> float:
        """Returns the position at which an operator begins."""
        return (1 - _OPTIMIZER) * index / max(1, self._last)


def _mark_layers(axes: "Axes", timeline: StepTimeline, place: _Places) -> None:
    """Draw bands behind the layers, and the names of as many layers as there is room for."""
    spans = layer_spans(timeline.layers, timeline.backward_at)
    names = short_names([span.name for span in spans])
    last = -1.0
    for number, span in enumerate(spans):
        begin, end = place(span.begin), place(span.end)
        if number % 2 == 0:
            axes.axvspan(begin, end, color=GRID, alpha=0.45, linewidth=0, zorder=0)
        middle, name = (begin + end) / 2, names[span.name]
        # A name of two letters is half as wide as one of four.
        if middle - last >= _APART * max(1.0, len(name) / 2):
            axes.text(
                middle, 0.985, name, transform=axes.get_xaxis_transform(), ha="center", va="top", color=MUTED, size=8
            )
            last = middle


def _mark_peak(axes: "Axes", timeline: StepTimeline, place: _Places, height: float, shows_process: bool) -> None:
    at = timeline.peak_at
    x = place(at + 0.5) if at < timeline.optimizer_at else 1 - _OPTIMIZER / 2
    label = f"peak {gib_text(timeline.peak)}{'' if shows_process else ' with the process'}"
    axes.plot([x], [height], marker="v", color=MARK, markersize=7, zorder=5, clip_on=False)
    _label(axes, label, (x, height), (8, 4), is_left=x > 0.55, va="bottom", color=TEXT)


def _label(
    axes: "Axes", text: str, at: tuple[float, float], offset: tuple[float, float], is_left: bool, **style: Any
) -> None:
    """Draw a label next to a point, at an offset in points."""
    away = (-offset[0] if is_left else offset[0], offset[1])
    side = "right" if is_left else "left"
    axes.annotate(text, at, xytext=away, textcoords="offset points", ha=side, weight="bold", **style)


def phases_svg(predicted: Sequence[Phase], measured: Sequence[Phase]) -> str:
    """Returns a chart of the phases' peaks, predicted next to measured."""
    pairs = ((predicted, PREDICTED), (measured, MEASURED))
    kinds = [({phase.name: phase.peak for phase in phases}, colour) for phases, colour in pairs if phases]
    names = list(kinds[0][0])
    largest = max(size for values, _ in kinds for size in values.values())
    unit, count = unit_of(largest)
    with figure("phases", 0.6 + 0.3 * len(names) * len(kinds)) as drawn:
        axes = drawn.subplots()
        thick = 0.8 / len(kinds)
        for number, (values, colour) in enumerate(kinds):
            shift = (number - (len(kinds) - 1) / 2) * thick
            rows = [index + shift for index, name in enumerate(names) if name in values]
            sizes = [values[name] for name in names if name in values]
            axes.barh(rows, [size / count for size in sizes], height=0.9 * thick, color=colour)
            for row, size in zip(rows, sizes, strict=True):
                end = (size / count, row)
                axes.annotate(gib_text(size), end, xytext=(4, 0), textcoords="offset points", va="center", size=9)
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.13 * largest / count)
        axes.set_xlabel(f"peak since the previous phase, {unit}")
        axes.grid(axis="x", linewidth=0.6)
        return svg_of(drawn, "Peak of each phase of a step, predicted and measured")


def frontier_svg(frontier: Frontier) -> str:
    """Returns a chart of extra time over the peak, with the plan in force."""
    with figure("frontier", 3.2) as drawn:
        axes = drawn.subplots()
        draw_frontier(axes, frontier, OF_LINE[0])
        if (chosen := frontier.chosen) is not None:
            _, count = unit_of(frontier.points[-1].peak)
            x, y = chosen.peak / count, 100 * chosen.extra_time
            axes.plot([x], [y], marker="o", markersize=10, color=MARK, zorder=5, clip_on=False)
            axes.set_ylim(top=max(axes.get_ylim()[1], 1.25 * y))
            low, high = axes.get_xlim()
            box = {"facecolor": BACK, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
            label = f"this plan: {chosen.extra_time:+.1%} time"
            is_left = x > (low + high) / 2
            _label(axes, label, (x, y), (10, 10), is_left, annotation_clip=False, bbox=box)
        return svg_of(drawn, "Extra time of a step over its predicted peak")


def draw_frontier(axes: "Axes", frontier: Frontier, colour: str = "C0") -> None:
    """Draw only the curve of `frontier_svg`."""
    unit, count = unit_of(frontier.points[-1].peak)
    peaks = [point.peak / count for point in frontier.points]
    times = [100 * point.extra_time for point in frontier.points]
    axes.plot(peaks, times, marker="o", markersize=4, drawstyle="steps-post", color=colour)
    axes.set_xlabel(f"predicted peak of a step, {unit}")
    axes.set_ylabel(f"extra time, % ({frontier.costs} costs)")
    axes.set_ylim(0, max(1.0, 1.25 * max(times)))
    axes.grid(linewidth=0.6)


def density_svg(densities: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Returns a chart of the percentage of each input that is not padding, over steps."""
    from matplotlib.ticker import MaxNLocator

    with figure("density", 2.6) as drawn:
        axes = drawn.subplots()
        for number, (name, points) in enumerate(densities.items()):
            steps, percents = zip(*points, strict=True)
            axes.plot(steps, percents, marker=".", color=OF_LINE[number % len(OF_LINE)], label=name)
        axes.set_ylim(0, 105)
        axes.set_xlabel("step")
        axes.set_ylabel("not padding, %")
        axes.grid(linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        drawn.legend(frameon=False, loc="outside upper left", ncols=4)
        return svg_of(drawn, "Share of tokens that are not padding, over steps")


_SUFFIXES = (".svg", ".png")


def check(path: Path) -> None:
    """Refuse a chart file that cannot be drawn.

    Raises:
        MemOptError: the file type is not supported, or matplotlib is missing.
    """
    if path.suffix.lower() not in _SUFFIXES:
        allowed = " or ".join(_SUFFIXES)
        raise MemOptError(f"--budget_curve {path_excerpt(path)}: allowed: names that end in {allowed}")
    check_drawing("--budget_curve", "a picture", ("matplotlib",))


def draw(frontier: Frontier, path: Path) -> None:
    """Write the chart of the time-memory frontier.

    Raises:
        MemOptError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    draw_frontier(figure.subplots(), frontier)
    with writing("--budget_curve", path):
        figure.savefig(path)
