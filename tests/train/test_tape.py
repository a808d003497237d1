"""Forwards with several graphs: tensors passed between graphs are held once, and predictions are the allocator's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from optimum_memopt.engines.api.predictions import SAVED, TEMPORARY
from optimum_memopt.engines.compile.memory.composition import bytes_left_by, compose
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents
from optimum_memopt.engines.compile.memory.tape import Call, RunId, Tape, TapeRecorder
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.simulator.events import Event, StepEvents, Storage
from tests.compiled import selection
from tests.gradients import Batch
from tests.rotation import in_turn, nightly
from tests.small_model import VOCABULARY
from tests.train.test_step_memory import EXACT, measured

_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 1}
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_DROPOUTS = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
_SPEECH = {
    **{**_LAYERS, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "vocab_size": 32, "mask_time_length": 4},
    **{**dict.fromkeys(_DROPOUTS, 0.0), "layerdrop": 0.0, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_YOSO = {**_LAYERS, **_STILL, "max_position_embeddings": 128}
_LED = {
    **{f"{half}_layers": 1 for half in ("encoder", "decoder")},
    **{f"{half}_attention_heads": 2 for half in ("encoder", "decoder")},
    **{f"{half}_ffn_dim": 64 for half in ("encoder", "decoder")},
    **{f"max_{half}_position_embeddings": 128 for half in ("encoder", "decoder")},
    **{"d_model": 32, "attention_window": 16, "dropout": 0.0, "use_cache": False},
    **{"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "yoso": ("YosoForMaskedLM", "YosoConfig", {**_TEXT, **_YOSO}),
    "led": ("LEDForConditionalGeneration", "LEDConfig", {**_TEXT, **_LED}),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH),
    "hubert": ("HubertForCTC", "HubertConfig", _SPEECH),
    # Separately compiled layers; the head reads a view of their output.
    "pooled": ("RobertaForSequenceClassification", "RobertaConfig", {**_TEXT, "num_hidden_layers": 4}),
}


def batch_of(name: str, rows: int, length: int) -> Batch:
    if MODELS[name][2] is _SPEECH:
        return {"input_values": torch.randn(rows, 32 * length), "labels": torch.randint(1, 32, (rows, 6))}
    ids = torch.randint(5, VOCABULARY, (rows, length))
    labels = ids[:, 0] % 2 if name == "pooled" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@in_turn
@pytest.mark.parametrize("name", nightly(MODELS, but=["yoso", "led"]))
@pytest.mark.parametrize("asked", ["", pytest.param("level 1", marks=pytest.mark.nightly)])
def test_predictions_are_the_allocators(name: str, asked: str) -> None:
    model_class, config_class, arguments = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**arguments)).train()
    engine = CompileEngine(compiler="aot_eager", loss="plain")
    engine.attach(model)
    engine.apply(selection(asked))
    model(**batch_of(name, 4, 64)).loss.backward()
    for size in ((4, 64), (3, 64), (6, 96)):
        batch = batch_of(name, *size)
        # A budget asks before a batch runs, when its own runs are not known yet.
        before = engine._planned.predictors.of(batch)
        before.activations(before.sizes_of(batch))
        measured(model, batch)
        saved, peak = measured(model, batch)
        predictor = engine._planned.predictors.of(batch)
        assert sum(predictor.tape.runs) > 1
        assert predictor.saved(predictor.sizes_of(batch)) == pytest.approx(saved, **EXACT)
        assert predictor.activations(predictor.sizes_of(batch)) == pytest.approx(peak, **EXACT)
    engine.detach()


# A graph that saves its output; its backward reads that and its gradient, and returns the input's gradient.
LINK = GraphEvents(
    forward=(Event("exp", allocates=(Storage("exp", 10, SAVED),)),),
    backward=(
        Event("mul", allocates=(Storage("backward mul", 10, TEMPORARY),), workspace=3, frees=("exp", "tangent")),
    ),
    inputs={0: Storage("x", 10, SAVED)},
    outputs=((0, "exp"),),
    saved=(Storage("exp", 10, SAVED),),
    saved_inputs=frozenset({"x"}),
    tangents=((0, Storage("tangent", 10)),),
    gradients=((0, "backward mul"),),
)
CHAIN = Tape((Call(0, {0: 1}, {0: 2}), Call(0, {0: 2}, {0: 3})), given=frozenset({1}))


def test_what_passes_between_graphs_is_held_once() -> None:
    step = compose(CHAIN, [LINK, LINK])
    # Both outputs are saved; the second graph's input is the first one's output.
    assert step.saved_bytes == 20
    # The second graph's backward holds its tangent and its gradient; that gradient is the first graph's tangent.
    assert step.peak() == 20 + 10 + 10 + 3
    assert step.peak(gradients=5) == 20 + 10 + 10 + 3 + 5


def test_graphs_that_pass_nothing_are_held_side_by_side() -> None:
    step = compose(Tape((Call(0), Call(0))), [LINK, LINK])
    assert step.saved_bytes == 20
    # The gradients of both inputs stay.
    assert step.peak() == 10 + 10 + 10 + 10 + 3


def test_bytes_left_are_those_of_the_runs_so_far() -> None:
    assert bytes_left_by(CHAIN, [LINK] * len(CHAIN.calls), 1) == 10
    assert bytes_left_by(CHAIN, [LINK] * len(CHAIN.calls), 0) == 0


def test_a_recorder_knows_storages_by_identity() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    x = torch.ones(3)
    recorder = TapeRecorder([x])
    recorder.before(RunId("first"), (x, weight, 7))
    y = x * 2
    recorder.after((y, y[1:]))
    recorder.before(RunId("second"), (y.view(3, 1), weight))
    recorder.after((x.sum(),))
    tape = recorder.tape(("first", "second"))
    first, second = tape.calls
    assert first.inputs[0] in tape.given and first.inputs[1] in tape.given
    assert first.outputs[0] == first.outputs[1] == second.inputs[0]
    assert second.inputs[1] == first.inputs[1]
    assert (first.sizes, second.sizes) == ({0: (3,), 2: (7,)}, {0: (3, 1)})
    assert recorder.tape(("second",)).calls[0].graph == 0


def test_a_recorder_marks_results_that_no_output_depends_on() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def tape(outputs: Callable[..., list[object]]) -> Tape:
        recorder = TapeRecorder([])
        runs = []
        for name in ("first", "second", "third"):
            recorder.before(RunId(name), (weight,))
            runs.append((weight * 2).split(2))
            recorder.after(runs[-1])
        recorder.end(outputs(*runs))
        return recorder.tape(("first", "second", "third"))

    marked = [(call.unread, call.is_unread) for call in tape(lambda first, second, third: [first[1], *third]).calls]
    assert marked == [({0}, False), ({0, 1}, True), (set(), False)]
    # The last run is always read: the outputs hold it where it is not found.
    assert not any(call.unread for call in tape(lambda first, second, third: [*first]).calls)
    assert not any(call.unread for call in tape(lambda first, second, third: [object()]).calls)


# A graph that saves one tensor and returns another.
SAVES_ANOTHER = replace(
    LINK,
    forward=(
        Event("exp", allocates=(Storage("exp", 10, SAVED),)),
        Event("sum", allocates=(Storage("sum", 5, TEMPORARY),)),
    ),
    outputs=((0, "sum"),),
    saved_inputs=frozenset(),
)


@pytest.mark.parametrize("last", [0, 1])
def test_a_run_without_a_backward_holds_what_it_saves_until_its_results_are_freed(last: int) -> None:
    released = [frozenset({10} if index == last else ()) for index in range(3)]
    calls = (Call(0, {0: 1}, {0: 10 + index}, released[index], is_unread=not index) for index in range(3))
    tape = Tape(tuple(calls), given=frozenset({1}))
    held = [bytes_left_by(tape, [SAVES_ANOTHER] * 3, count) for count in range(3)]
    assert held == [15 * (count - (count > last)) for count in range(3)]
    assert compose(tape, [SAVES_ANOTHER] * 3).saved_bytes == 2 * 10


# A graph that saves only its input; each output is the input of the next run.
SQUARE = GraphEvents(
    forward=(Event("square", allocates=(Storage("square", 10),), workspace=2),),
    backward=(Event("mul", allocates=(Storage("backward mul", 10),), frees=("x", "tangent")),),
    inputs={0: Storage("x", 10)},
    outputs=((0, "square"),),
    saved=(),
    saved_inputs=frozenset({"x"}),
    tangents=((0, Storage("tangent", 10)),),
    gradients=((0, "backward mul"),),
)


def squares(**plans: frozenset[int]) -> StepEvents:
    """Compose five runs, some with offloaded or recomputed arguments."""
    calls = [Call(0, {0: n}, {0: n + 1}, frozenset({n} if n > 1 else ())) for n in range(1, 6)]
    for kind, runs in plans.items():
        calls = [replace(call, **{kind: frozenset({0} if n in runs else ())}) for n, call in enumerate(calls)]
    return compose(Tape(tuple(calls), given=frozenset({1})), [SQUARE] * len(calls))


def test_arguments_that_are_recomputed_are_not_held_in_between() -> None:
    assert (squares().saved_bytes, squares().peak()) == (40, 60)
    step = squares(recomputed={2, 3})
    assert step.saved_bytes == 20
    # The first held argument, both outputs recomputed from it, a gradient, and the input's gradient.
    assert step.peak() == 10 + 20 + 10 + 10
    again = [event.allocates[0].name for event in step.events[step.forward_end :] if event.operator == "square"]
    assert again == ["storage 3 for 2", "storage 4 for 3"]


def test_arguments_that_are_offloaded_are_reloaded_one_run_ahead() -> None:
    step = squares(offloaded={1, 2, 3})
    assert step.saved_bytes == 10
    # Two reloaded arguments, a gradient, and the input's gradient.
    assert step.peak() == 20 + 10 + 10
    reloads = [event.allocates[0].name for event in step.events if event.kind == "reload"]
    assert reloads == ["storage 4 for 3", "storage 3 for 2", "storage 2 for 1"]
