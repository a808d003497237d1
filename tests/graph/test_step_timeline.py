"""A step's memory by category: for each operator, the sums equal the prediction."""

from dataclasses import replace

import pytest

from optimum_memopt.engines.api.predictions import (
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    POST_BACKWARD,
    POST_FORWARD,
    RECOMPUTED,
    SAVED,
    TEMPORARY,
)
from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.footprint import Footprint, step_timeline
from optimum_memopt.engines.compile.memory.graph_events import prediction_of
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.simulator.events import Event, StepEvents, Storage

PLANS = ("", "level 1", "Gelu+:1:-1,Dropout+:3:2")
AROUND = Footprint(0, parameters=1000, buffers=24, batch=30, optimizer=2000, gradients=1000, constant=5000)
ALWAYS = 1000 + 24 + 30 + 2000 + 5000


def predicted(captured, asked):
    """Returns the prediction of the graph alone, and its step."""
    events = captured.split(asked).graph.timeline.at(captured.sizes)
    return prediction_of(events), compose(Tape.of_one(), [events])


@pytest.fixture(scope="module", params=PLANS)
def roberta_step(request, roberta):
    prediction, step = predicted(roberta, request.param)
    return prediction, step_timeline(step, replace(AROUND, activations=prediction.peak), {})


def test_every_operator_holds_what_is_predicted(roberta_step):
    prediction, found = roberta_step
    expected = [*prediction.forward.held, *prediction.backward.held]
    assert [size - ALWAYS for size in found.total[:-1]] == expected
    assert found.operators[:-1] == (*prediction.forward.order, *prediction.backward.order)
    assert found.backward_at == len(prediction.forward.held)
    assert found.held.keys() == set(CATEGORIES)
    assert min(size for sizes in found.held.values() for size in sizes) == 0


def test_the_highest_operator_is_the_predicted_peak(roberta_step):
    prediction, found = roberta_step
    assert found.peak == replace(AROUND, activations=prediction.peak).peak
    assert sum(group.bytes for group in found.alive) == found.peak
    at = {name: sizes[found.peak_at] for name, sizes in found.held.items()}
    for name in CATEGORIES:
        assert sum(group.bytes for group in found.alive if group.category == name) == at[name]


def test_an_optimizers_step_may_be_the_peak(roberta):
    prediction, step = predicted(roberta, "")
    around = replace(AROUND, activations=prediction.peak, step=2 * prediction.peak)
    found = step_timeline(step, around, {})
    assert found.peak == around.peak == ALWAYS + 1000 + 2 * prediction.peak
    assert (found.peak_phase, found.peak_at) == ("optimizer", found.optimizer_at)
    assert {group.category: group.bytes for group in found.alive}[TEMPORARY] == 2 * prediction.peak


def test_the_peak_may_be_between_two_operators():
    events = (
        Event("mm", "mm", allocates=(Storage("mm", 100),)),
        Event("", allocates=(Storage("tangent", 50, kind="tangent"),), frees=("mm",)),
        Event("backward mm", "mm", frees=("tangent",)),
    )
    step = StepEvents(events, 0)
    around = replace(AROUND, gradients=0, activations=step.peak())
    found = step_timeline(step, around, {})
    assert found.peak == around.peak == ALWAYS + 150
    assert sum(group.bytes for group in found.alive) == found.peak


def test_tensors_of_the_model_are_named_where_they_add_up(roberta):
    prediction, step = predicted(roberta, "")
    sizes = {PARAMETERS: (600, 424), OPTIMIZER: (1000, 999)}
    tensors = [
        Storage(f"{name} {n}", size, name, "float32") for name, own in sizes.items() for n, size in enumerate(own)
    ]
    found = step_timeline(step, replace(AROUND, activations=prediction.peak), {}, tensors=tensors)
    given = {group.category: group for group in found.alive if group.category in sizes}
    assert (given[PARAMETERS].name, given[PARAMETERS].count) == ("float32", 2)
    assert (given[OPTIMIZER].name, given[OPTIMIZER].count, given[OPTIMIZER].bytes) == ("", 0, 2000)


def test_between_the_graphs_is_what_is_saved(roberta_step):
    prediction, found = roberta_step
    saved = found.held[SAVED]
    assert saved[found.backward_at - 1] == prediction.saved_bytes == max(saved)
    phases = {phase.name: phase for phase in found.phases}
    assert phases[POST_FORWARD].held == ALWAYS + prediction.forward.end
    assert phases[POST_FORWARD].peak == ALWAYS + prediction.forward.peak
    assert phases[POST_BACKWARD].peak == ALWAYS + prediction.backward.peak


def test_what_the_backward_returns_are_gradients(roberta_step):
    prediction, found = roberta_step
    assert not any(found.held[GRADIENTS][: found.backward_at])
    in_backward = found.held[GRADIENTS][found.backward_at : -1]
    assert list(in_backward) == sorted(in_backward)
    assert in_backward[-1] == pytest.approx(prediction.backward.end, abs=4096)


def test_a_level_recomputes_and_no_plan_does_not(roberta):
    for asked, recomputes in (("Gelu+:1:0", False), ("level 1", True)):
        _, step = predicted(roberta, asked)
        found = step_timeline(step, AROUND, {})
        assert bool(max(found.held[RECOMPUTED])) == recomputes
        assert not any(found.held[RECOMPUTED][: found.backward_at])


def test_layers_are_those_of_the_model(roberta_step):
    _, found = roberta_step
    names = {layer for layer in found.layers if layer}
    assert names == {"roberta.encoder.layer.0", "roberta.encoder.layer.1"}
    first = [found.layers.index(name) for name in sorted(names)]
    assert first == sorted(first)
    in_backward = found.layers[found.backward_at :]
    assert in_backward.index("roberta.encoder.layer.1") < in_backward.index("roberta.encoder.layer.0")


def test_saved_activations_have_the_names_of_their_rows(roberta):
    prediction, step = predicted(roberta, "Gelu+:1:0")
    found = step_timeline(step, replace(AROUND, activations=prediction.peak), {})
    names = {group.name for group in found.alive if group.category == SAVED}
    assert {"Gelu+", "Dropout+"} & names
    counted = [group for group in found.alive if group.category == SAVED]
    assert all(group.count > 0 and len(group.layers) <= 2 for group in counted)


def test_several_graphs_peak_where_their_step_does(roberta, gpt2):
    graphs = [roberta.split("level 1").graph, gpt2.split("").graph, roberta.split("").graph]
    step = compose(Tape((Call(0), Call(1), Call(2))), [graph.timeline.at(graph.sizes) for graph in graphs])
    around = replace(AROUND, activations=step.peak(77))
    assert step_timeline(step, around, {}, 77).peak == around.peak
    assert max(step_timeline(step, around, {}, 77).held[PARAMETERS]) == 1024
    assert set(step_timeline(step, around, {}).held[OPTIMIZER]) == {2000}
