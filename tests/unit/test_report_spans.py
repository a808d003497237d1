from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.report.charts import Span, columns, layer_spans, short_names


def test_operators_of_no_layer_within_a_layer_are_its_own():
    layers = ["", "h.0", "", "h.0", "h.1", "", "", "h.1", "h.0", ""]
    assert layer_spans(layers, border=10) == [Span("h.0", 1, 4), Span("h.1", 4, 8), Span("h.0", 8, 9)]
    assert layer_spans(["a", "a", "", "a"], border=2) == [Span("a", 0, 2), Span("a", 3, 4)]
    assert layer_spans([], 0) == layer_spans(["", ""], 1) == []


def test_layers_are_named_by_what_tells_them_apart():
    assert short_names(["model.layers.0", "model.layers.11"]) == {"model.layers.0": "0", "model.layers.11": "11"}
    both = ["encoder.block.0", "decoder.block.0"]
    assert short_names(both) == {path: path for path in both}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.integers(1, 40), st.data())
def test_columns_cover_all_operators_and_have_the_highest(total, most, data):
    begin = data.draw(st.integers(0, len(total) - 1))
    end = data.draw(st.integers(begin, len(total)))
    found = columns(total, begin, end, most)
    assert len(found) == min(most, end - begin)
    edges = [first for first, _ in found] + [end]
    assert edges == sorted(set(edges)) and (not found or edges[0] == begin)
    for (first, highest), last in zip(found, edges[1:], strict=True):
        assert first <= highest < last and total[highest] == max(total[first:last])
