"""Predicted liveness of graphs against torch's allocator."""

import pytest
import sympy
import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._sympy.functions import CleanDiv, FloorDiv, IntTrueDiv, Max, Min, Mod, PythonMod, TruncToInt

from optimum_memopt.engines.compile.graph.joint import root, storage_bytes, value
from optimum_memopt.engines.compile.graph.symbols import SymbolValues, compile_sizes
from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents, prediction_of
from optimum_memopt.engines.compile.memory.schedule import schedule
from optimum_memopt.engines.compile.memory.tape import Tape
from optimum_memopt.engines.simulator.events import bytes_during
from tests.captured import Captured, capture, real

# Bytes that operators take while they run: a tensor for each scalar argument, and two rows of a layer norm in its
# backward.
SCRATCH = 256


def events_of(captured: Captured, asked: str, sizes: SymbolValues) -> GraphEvents:
    parts = captured.split(asked)
    return schedule(parts.forward, parts.backward, parts.num_fwd_outputs).at(sizes)


def saved_bytes(events: GraphEvents) -> int:
    return sum(storage.bytes for storage in events.saved)


def measured(module: fx.GraphModule, sizes: dict) -> tuple[int, int]:
    """Returns the bytes at the peak and at the end of a run, without its inputs."""
    inputs = [real(value(node), sizes) for node in module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        module(*inputs)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            outputs = module(*inputs)
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del outputs
    return most, held


def check(captured: Captured, asked: str, grown: int = 0) -> None:
    sizes = {symbol: size + grown for symbol, size in captured.sizes.items()}
    parts, events = captured.split(asked), events_of(captured, asked, sizes)
    # Run alone, neither half frees its inputs.
    for half, run in ((parts.forward, events.forward), (parts.backward, events.backward)):
        during, left = bytes_during(run)
        peak, end = measured(half, sizes)
        assert left == end
        assert 0 <= peak - max(during) <= SCRATCH


@pytest.mark.parametrize("grown", [0, 3])
@pytest.mark.parametrize("asked", ["", "level 1", "FastGelu+:1:-1,FusedMatMul+Add+:1:2"])
def test_a_real_model(albert, asked, grown):
    check(albert, asked, grown)


def test_a_real_model_with_dropout(roberta):
    check(roberta, "Gelu+:1:-1,Dropout+:1:3", 3)


# Large enough for a row in fixed sizes.
LENGTH = 2048
FUNCTIONS = {
    "a chain": lambda x: x.exp().sin().exp().sum(),
    "views keep their root": lambda x: (x.exp().t().sin().t() * x.sin()[:, :2].sum()).sum(),
    "outputs of one operator": lambda x: torch.nn.functional.layer_norm(x, (16,)).exp().sum(),
    "unread outputs": lambda x: torch.nn.functional.layer_norm(x, (16,)).sum() + x.max(1).values.exp().sum(),
    "split": lambda x: sum(one.exp().sum() * place for place, one in enumerate(x.exp().split(4, 1), 1)),
    "in place": lambda x: x.exp().clone().mul_(2).add_(x).relu_().sum(),
    "expanded": lambda x: (x.sum(1, keepdim=True).expand(-1, 16).exp() * x).sum(),
    "cast to the other's numbers": lambda x: (x.exp() * (x > 0) + x.exp().long()).exp().sum(),
    "stacked": lambda x: torch.stack([x.sin(), x.cos()]).exp().sum(0).exp().sum(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_each_kind_of_operator(function):
    x = torch.randn(16, 16, requires_grad=True)
    check(capture(function, x, dynamic=False), "level 1")


def test_statistics_of_a_norm_in_half_precision_are_in_float32():
    """Statistics are predicted in float32, in which a CPU computes them, although traced in half precision."""
    x = torch.randn(LENGTH, 16, requires_grad=True)
    norm = torch.nn.functional.layer_norm
    captured = capture(lambda x: norm(x.bfloat16(), (16,), x[0], x[1]).exp().sum(), x, dynamic=False)
    forward = captured.split().forward
    (during, left), (peak, end) = bytes_during(events_of(captured, "", {}).forward), measured(forward, {})
    assert left == end
    assert 0 <= peak - max(during) <= SCRATCH


def test_what_is_owned_is_freed_after_its_last_use():
    captured = capture(lambda x: x.exp().sin().exp().sum(), torch.randn(LENGTH, requires_grad=True), dynamic=False)
    events = events_of(captured, "level 1", {})
    run = prediction_of(events).backward
    assert run.held[0] >= saved_bytes(events) + 4
    assert run.end == LENGTH * 4, "nothing but the gradient of x is left"
    assert bytes_during(events.backward)[1] == run.end, "of others' nothing is freed"


def test_what_waits_between_the_halves_is_what_is_saved():
    captured = capture(lambda x: x.exp().sin().exp().sum(), torch.randn(LENGTH, requires_grad=True), dynamic=False)
    prediction = prediction_of(events_of(captured, "level 1", {}))
    assert prediction.saved_bytes == sum(int(saved.bytes) for saved in captured.activations) == 2 * LENGTH * 4
    assert prediction.peak == max(prediction.forward.peak, prediction.backward.peak)
    assert saved_bytes(events_of(captured, "Exp+:1:1", {})) == LENGTH * 4


def test_a_level_lowers_the_peak_and_what_is_saved(roberta):
    without, with_level = (roberta.split(asked).graph.prediction for asked in ("Gelu+:1:0", "level 1"))
    assert with_level.saved_bytes < 0.6 * without.saved_bytes
    assert with_level.peak < without.peak


ROWS, TOKENS = (sympy.Symbol(name, integer=True, positive=True) for name in ("rows", "length"))
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
    assert saved_bytes(events) == sum(int(storage_bytes(node).subs(roberta.sizes)) for node in tensors)
    assert {storage.name for storage in events.saved} == {node.name for node in tensors}


EXPRESSIONS = [
    sympy.Integer(7),
    ROWS * TOKENS * 4,
    (ROWS + 3) ** 2 * TOKENS - 1,
    ROWS * TOKENS * (TOKENS + 1) / 2,
    sympy.floor(ROWS / 3) + sympy.ceiling(TOKENS / 7),
    FloorDiv(ROWS, 8) * 8 + Mod(ROWS, 8),
    PythonMod(TOKENS - 100, 16),
    CleanDiv(ROWS * 6, 2),
    Max(1, ROWS - 5) * Min(TOKENS, sympy.Integer(64)),
    TruncToInt(IntTrueDiv(TOKENS, 2)) + ROWS,
    sympy.sqrt(ROWS**2) * sympy.Pow(TOKENS, -1) * TOKENS,
]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 50), (128, 511), (4096, 131_072)], ids=str)
def test_compiled_sizes_are_sympys(sizes):
    values = dict(zip((ROWS, TOKENS), sizes, strict=True))
    assert compile_sizes(EXPRESSIONS)(values) == [int(expression.subs(values)) for expression in EXPRESSIONS]


def test_large_sizes_are_exact():
    values = {ROWS: LARGE, TOKENS: LARGE}
    exact = [ROWS * TOKENS, ROWS * (TOKENS + 1) / 2, FloorDiv(ROWS * TOKENS, 3), sympy.floor(ROWS / 5)]
    assert compile_sizes(exact)(values) == [LARGE**2, LARGE * (LARGE + 1) // 2, LARGE**2 // 3, LARGE // 5]


@pytest.mark.parametrize("expression", [ROWS * 4, TruncToInt(IntTrueDiv(TOKENS, 2))])
def test_a_size_without_a_value_is_an_error(expression):
    with pytest.raises((KeyError, TypeError)):
        compile_sizes([expression])({})
