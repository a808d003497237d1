"""The compiled timeline against plain liveness with sympy, equal to the byte."""

import pytest
import sympy
from torch.utils._sympy.functions import CleanDiv, FloorDiv, IntTrueDiv, Max, Min, Mod, PythonMod, TruncToInt

from optimum_memopt.engines.compile.graph.joint import root, storage_bytes
from optimum_memopt.engines.compile.graph.symbols import compile_sizes
from optimum_memopt.engines.compile.memory.timeline import graph_timeline
from tests.graph import reference_liveness

PLANS = {
    "roberta": ("", "level 1", "level 2", "Gelu+:1:-1,Dropout+:3:2"),
    "gpt2": ("", "level 1", "FastGelu+:1:-1"),
    "albert": ("", "level 1", "FastGelu+:3:-1"),
}
ROWS, LENGTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("rows", "length"))
LARGE = 2**53 + 1


@pytest.mark.parametrize(("model", "asked"), [(model, asked) for model, plans in PLANS.items() for asked in plans])
@pytest.mark.parametrize("holds_outputs", [False, True])
def test_every_operator_holds_what_the_reference_says(request, model, asked, holds_outputs):
    captured = request.getfixturevalue(model)
    parts = captured.split(asked)
    graphs = parts.forward, parts.backward, parts.num_fwd_outputs
    inputs = {node.name for node in parts.forward.graph.find_nodes(op="placeholder")}
    static = {name for name in inputs if "primals_1" not in name}
    timeline = graph_timeline(*graphs, holds_outputs, static)
    for grown in (0, 2**20 + 1):
        sizes = {symbol: size + grown for symbol, size in captured.sizes.items()}
        prediction = timeline.predict(sizes)
        assert prediction == reference_liveness.predict(*graphs, sizes, holds_outputs, static)
        assert prediction.forward.peak.held == max(prediction.forward.held)


@pytest.mark.parametrize("model", PLANS)
@pytest.mark.parametrize("asked", ["", "level 1"])
def test_requests_have_the_peak_of_the_prediction(request, model, asked):
    captured = request.getfixturevalue(model)
    parts = captured.split(asked)
    timeline = graph_timeline(parts.forward, parts.backward, parts.num_fwd_outputs)
    held, peak = {}, 0
    for storage, size in timeline.requests(captured.sizes):
        if size:
            assert storage not in held
            held[storage] = size
        else:
            held.pop(storage, None)
        peak = max(peak, sum(held.values()))
    prediction = timeline.predict(captured.sizes)
    assert peak == prediction.peak and sum(held.values()) == prediction.backward.end


@pytest.mark.parametrize("asked", ["", "level 1"])
def test_saved_bytes_are_those_of_the_distinct_storages(roberta, asked):
    parts = roberta.split(asked)
    timeline = graph_timeline(parts.forward, parts.backward, parts.num_fwd_outputs)
    saved = {root(node) for node in parts.saved_for_backward if root(node).op != "placeholder"}
    tensors = [node for node in saved if hasattr(node.meta["val"], "shape")]
    expected = sum(int(storage_bytes(node).subs(roberta.sizes)) for node in tensors)
    assert timeline.saved_bytes(roberta.sizes) == expected
    storages = timeline.saved_for_backward(roberta.sizes).values()
    assert {storage.root for storage in storages if storage} == {node.name for node in tensors}


EXPRESSIONS = [
    sympy.Integer(7),
    ROWS * LENGTH * 4,
    (ROWS + 3) ** 2 * LENGTH - 1,
    ROWS * LENGTH * (LENGTH + 1) / 2,
    sympy.floor(ROWS / 3) + sympy.ceiling(LENGTH / 7),
    FloorDiv(ROWS, 8) * 8 + Mod(ROWS, 8),
    PythonMod(LENGTH - 100, 16),
    CleanDiv(ROWS * 6, 2),
    Max(1, ROWS - 5) * Min(LENGTH, sympy.Integer(64)),
    TruncToInt(IntTrueDiv(LENGTH, 2)) + ROWS,
    sympy.sqrt(ROWS**2) * sympy.Pow(LENGTH, -1) * LENGTH,
]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 50), (128, 511), (4096, 131_072)], ids=str)
def test_compiled_sizes_are_sympys(sizes):
    values = dict(zip((ROWS, LENGTH), sizes, strict=True))
    assert compile_sizes(EXPRESSIONS)(values) == [int(expression.subs(values)) for expression in EXPRESSIONS]


def test_large_sizes_are_exact():
    values = {ROWS: LARGE, LENGTH: LARGE}
    exact = [ROWS * LENGTH, ROWS * (LENGTH + 1) / 2, FloorDiv(ROWS * LENGTH, 3), sympy.floor(ROWS / 5)]
    assert compile_sizes(exact)(values) == [LARGE**2, LARGE * (LARGE + 1) // 2, LARGE**2 // 3, LARGE // 5]


@pytest.mark.parametrize("expression", [ROWS * 4, TruncToInt(IntTrueDiv(LENGTH, 2))])
def test_a_size_without_a_value_is_an_error(expression):
    with pytest.raises((KeyError, TypeError)):
        compile_sizes([expression])({})
