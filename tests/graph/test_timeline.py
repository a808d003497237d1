"""The events of a graph, and sizes that are computed without sympy; `test_simulation.py` compares each operator."""

import pytest
import sympy
from torch.utils._sympy.functions import CleanDiv, FloorDiv, IntTrueDiv, Max, Min, Mod, PythonMod, TruncToInt

from optimum_memopt.engines.compile.graph.joint import root, storage_bytes
from optimum_memopt.engines.compile.graph.symbols import compile_sizes
from optimum_memopt.engines.compile.memory.events import bytes_during, schedule
from optimum_memopt.engines.compile.memory.tape import Tape, compose

ROWS, LENGTH = (sympy.Symbol(name, integer=True, positive=True) for name in ("rows", "length"))
LARGE = 2**53 + 1


@pytest.mark.parametrize("model", ["roberta", "gpt2", "albert"])
@pytest.mark.parametrize("asked", ["", "level 1", "FusedMatMul+Add+:3:1"])
def test_a_tape_of_one_graph_has_its_prediction(request, model, asked):
    captured = request.getfixturevalue(model)
    parts = captured.split(asked)
    events = schedule(parts.forward, parts.backward, parts.num_fwd_outputs)
    step, prediction = compose(Tape.of_one(), [events.at(captured.sizes)]), events.predict(captured.sizes)
    held: dict[str, int] = {}
    for event in step.events:
        assert not held.keys() & {storage.name for storage in event.allocates}
        held.update((storage.name, storage.bytes) for storage in event.allocates)
        for name in event.frees:
            held.pop(name, None)
    assert step.peak() == prediction.peak and sum(held.values()) == prediction.backward.end
    assert step.saved_bytes == prediction.saved_bytes
    assert bytes_during(step.events)[1] == prediction.backward.end


@pytest.mark.parametrize("asked", ["", "level 1"])
def test_saved_bytes_are_those_of_the_distinct_storages(roberta, asked):
    parts = roberta.split(asked)
    events = schedule(parts.forward, parts.backward, parts.num_fwd_outputs).at(roberta.sizes)
    saved = {root(node) for node in parts.saved_for_backward if root(node).op != "placeholder"}
    tensors = [node for node in saved if hasattr(node.meta["val"], "shape")]
    assert events.saved_bytes == sum(int(storage_bytes(node).subs(roberta.sizes)) for node in tensors)
    assert {storage.name for storage in events.saved} == {node.name for node in tensors}


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
