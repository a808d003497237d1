"""Labels for the points of a plot that overlap neither each other nor a point."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Box(NamedTuple):
    """A rectangle, in pixels."""

    left: float
    bottom: float
    width: float
    height: float

    def overlap(self, other: "Box") -> float:
        """Returns the area that both cover, in pixels."""
        wide = min(self.left + self.width, other.left + other.width) - max(self.left, other.left)
        high = min(self.bottom + self.height, other.bottom + other.height) - max(self.bottom, other.bottom)
        return max(0.0, wide) * max(0.0, high)


_DIRECTIONS = 16
_DISTANCES = (7, 12, 18, 26, 36, 48, 62, 78, 96)


def places(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], room: Box, dot: float
) -> list[Box]:
    """Place the labels one after the other, each as close to its point as the labels before it permit.

    Args:
        points: positions of the points, in pixels.
        sizes: width and height of each label, in pixels.
        room: the rectangle that labels must lie in.
        dot: width of a point, in pixels.
    """
    dots = [Box(x - dot / 2, y - dot / 2, dot, dot) for x, y in points]
    placed: list[Box] = []
    for point, size in zip(points, sizes, strict=True):
        taken = [*dots, *placed]
        # Among equally free candidates, the first is the nearest.
        placed.append(min(_candidates(point, size), key=lambda box: _cost(box, taken, room)))
    return placed


def _candidates(point: tuple[float, float], size: tuple[float, float]) -> Iterable[Box]:
    (x, y), (width, height) = point, size
    for distance, step in itertools.product(_DISTANCES, range(_DIRECTIONS)):
        angle = 2 * math.pi * (step + 2) / _DIRECTIONS
        across, up = math.cos(angle), math.sin(angle)
        left, bottom = x + distance * across - width / 2, y + distance * up - height / 2
        yield Box(left + across * width / 2, bottom + up * height / 2, width, height)


def _cost(box: Box, taken: Iterable[Box], room: Box) -> float:
    outside = box.width * box.height - box.overlap(room)
    return round(sum(box.overlap(other) for other in taken) + outside, 3)


def label(axes: Any, points: Sequence[tuple[str, tuple[float, float]]], size: float = 6.5, dot: float = 9) -> None:
    """Write the names of points beside them, with a line if the name is not adjacent to its point.

    Args:
        axes: matplotlib axes with final limits and layout.
        points: names and positions; a name may occur twice.
        size: font size, in points.
        dot: width of a point's marker, in pixels.
    """
    figure = axes.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    anchors = [tuple(axes.transData.transform(point)) for _, point in points]
    sizes = []
    for name, _ in points:
        text = axes.text(0, 0, name, fontsize=size)
        extent = text.get_window_extent(renderer)
        text.remove()
        sizes.append((extent.width + 2, extent.height + 1))
    area = axes.get_window_extent(renderer)
    room = Box(area.x0, area.y0, area.width, area.height)
    for (name, point), anchor, box in zip(points, anchors, places(anchors, sizes, room, dot), strict=True):
        scale = 72 / figure.dpi
        shift = ((box.left - anchor[0]) * scale, (box.bottom - anchor[1]) * scale)
        nearest = (
            min(max(anchor[0], box.left), box.left + box.width) - anchor[0],
            min(max(anchor[1], box.bottom), box.bottom + box.height) - anchor[1],
        )
        line = {"arrowstyle": "-", "color": "grey", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            name,
            point,
            xytext=shift,
            textcoords="offset points",
            fontsize=size,
            arrowprops=line if math.hypot(*nearest) > dot else None,
        )
