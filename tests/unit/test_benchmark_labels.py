"""Labels of a plot: none over another, none over a point, as near as there is room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from labels import Box, label, places

ROOM = Box(0, 0, 400, 300)
DOT = 8


@given(st.lists(st.tuples(st.integers(60, 340), st.integers(30, 270)), min_size=1, max_size=12, unique=True))
def test_few_labels_are_never_over_one_another_or_a_point(points):
    boxes = places(points, [(50, 9)] * len(points), ROOM, DOT)
    dots = [Box(x - DOT / 2, y - DOT / 2, DOT, DOT) for x, y in points]
    for number, box in enumerate(boxes):
        assert not any(box.overlap(other) for other in boxes[:number])
        assert not any(box.overlap(dot) for dot in dots)
        assert box.overlap(ROOM) == pytest.approx(box.width * box.height)


def test_a_label_alone_is_beside_its_point():
    (box,) = places([(200, 150)], [(50, 9)], ROOM, DOT)
    assert abs(box.left - 200) < 60 and 150 < box.bottom < 165


def test_labels_of_points_in_a_heap_have_lines():
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = [(f"number {index}", (1 + index / 1000, 1.0)) for index in range(8)]
    axes.scatter(*zip(*(point for _, point in points), strict=True))
    axes.set_xlim(0, 2)
    label(axes, points)
    texts = [text for text in axes.texts if text.get_text()]
    assert [text.get_text() for text in texts] == [name for name, _ in points]
    assert any(text.arrow_patch is not None for text in texts)
    renderer = figure.canvas.get_renderer()
    extents = [text.get_window_extent(renderer) for text in texts if text.arrow_patch is None]
    assert not any(a.overlaps(b) for number, a in enumerate(extents) for b in extents[:number])
