"""Retraced forwards: each batch is predicted from the graphs that it ran."""

import gc
from collections.abc import Iterator

import pytest
import sympy
import torch
from allocations import allocated
from transformers.modeling_outputs import SequenceClassifierOutput

from optimum_memopt.engines.compile.graph.symbols import bound_symbols
from optimum_memopt.engines.compile.predict.pending import Forward, Pending, largest_shapes
from optimum_memopt.engines.compile.train.engine import CompileEngine
from tests.compiled import selection
from tests.gradients import Batch
from tests.rotation import in_turn, nightly
from tests.train.test_caveat import Layer
from tests.train.test_step_memory import EXACT, Predicted, measured, predicted


class OneLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()


class Squares(OneLayer):
    """Attends among a row's tokens, with positions from a Python number of tokens, as in Funnel."""

    def forward(self, x: torch.Tensor) -> SequenceClassifierOutput:
        positions = torch.tensor(range(int(x.shape[1])), dtype=torch.float32)
        scores = self.layer(x) @ x.transpose(1, 2) + positions
        return SequenceClassifierOutput(loss=scores.softmax(-1).square().sum())


class Blocks(OneLayer):
    """Weights a row by its number of blocks of four tokens, as in LongT5's transient-global attention."""

    def forward(self, x: torch.Tensor) -> SequenceClassifierOutput:
        blocks = torch.ones(len(range(x.shape[1] // 4)))
        return SequenceClassifierOutput(loss=self.layer(x).square().sum() * blocks.sum())


class Nested(OneLayer):
    """Takes its inputs in a dict."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(loss=self.layer(inputs["x"]).square().sum())


def attached(model: torch.nn.Module, dynamic: bool = True) -> CompileEngine:
    engine = CompileEngine(selection("Gelu+:1:-1"), "aot_eager", dynamic=dynamic)
    engine.outputs_read_by = lambda: ""
    engine.attach(model)
    return engine


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, tokens, 64)}


@in_turn
@pytest.mark.parametrize("dynamic", nightly([True, False], but=[True]))
def test_the_highest_peak_of_a_run_is_that_of_the_largest_batch(dynamic: bool) -> None:
    model = Squares()
    engine = attached(model, dynamic)
    predicted = []
    for rows, tokens in ((4, 8), (4, 40), (6, 40), (2, 8)):
        one = batch(rows, tokens)
        measured(model, one)
        peak = measured(model, one)[1]
        around = engine.predicted_peak_mib(None)
        predicted.append((peak, around * 2**20))
    (small, first), (_, second), (large, third), (_, last) = predicted
    # The batch's own bytes also count.
    grown = batch(6, 40)["x"].nbytes - batch(4, 8)["x"].nbytes
    assert first < second < third == last
    assert third - first == pytest.approx(large - small + grown, **EXACT)


def test_sizes_of_inputs_in_a_dict_count() -> None:
    model = Nested()
    engine = attached(model)
    model(inputs=batch(4, 8)).loss.backward()
    assert engine.predictor.sizes_of({"inputs": batch(6, 40)}) == {"inputs_x_dim0": 6, "inputs_x_dim1": 40}


@in_turn
@pytest.mark.parametrize("lengths", [(8, 40), (40, 8)])
def test_forwards_of_several_traces_before_one_backward(lengths: tuple[int, int]) -> None:
    model, batches = Squares(), {tokens: batch(64, tokens) for tokens in (8, 40)}
    engine = attached(model)
    for tokens in (8, 40, 8):
        model(**batches[tokens]).loss.backward()
    before = engine.predicted_peak_mib(None)

    def contrast() -> None:
        sum(model(**batches[tokens]).loss for tokens in lengths).backward()

    model.zero_grad(set_to_none=True)
    both = allocated(contrast)[0]
    alone = measured(model, batches[40])[1]
    after = engine.predicted_peak_mib(None)
    assert (after - before) * 2**20 == pytest.approx(both - alone, **EXACT)


@in_turn
@pytest.mark.parametrize(("kind", "is_bound"), [(Squares, False), (Blocks, True)])
def test_a_length_that_the_graph_is_bound_to_is_a_caveat(kind: type[torch.nn.Module], is_bound: bool) -> None:
    model = kind()
    engine = attached(model)
    model(**batch(4, 8)).loss.backward()
    found = "only for inputs_x_dim1=8, since other sizes may be retraced" in engine.plans().header[1]
    assert found == is_bound


def test_bound_by_an_equation_that_twice_as_much_breaks() -> None:
    rows, tokens = sympy.symbols("rows tokens", integer=True, positive=True)
    even = sympy.Eq(sympy.Mod(tokens, 8), 0)
    blocks = sympy.Eq(sympy.floor(tokens / 4) + 1, 13)
    sizes = {rows: 8, tokens: 48}
    assert not bound_symbols([even, sympy.Eq(rows * 6, tokens), tokens < 64, sympy.Ne(tokens, 96)], sizes)
    assert bound_symbols([even, blocks], sizes) == {tokens}


# Activations take most of a step's memory in the first model, weights in the second.
MODELS = {"roberta": {}, "gpt2": {"n_embd": 128, "n_layer": 1}}


@pytest.fixture(scope="module", params=nightly(MODELS, but=["gpt2"]))
def subject(request: pytest.FixtureRequest) -> Iterator[Predicted]:
    model = predicted(request.param, "aot_eager", **MODELS[request.param])
    model.train("level 1" if request.param == "roberta" else "no plan")
    yield model
    model.engine.detach()


def contrast(model: torch.nn.Module, batches: list[Batch]) -> None:
    sum(model(**batch).loss for batch in batches).backward()


def drop(model: torch.nn.Module, batches: list[Batch]) -> None:
    for batch in batches[:-1]:
        model(**batch)
    model(**batches[-1]).loss.backward()


def one_after_the_other(model: torch.nn.Module, batches: list[Batch]) -> None:
    for batch in batches:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()


@pytest.mark.parametrize(
    ("step", "picked"),
    [(contrast, picked) for picked in ((0,), (0, 0), (0, 0, 0), (2, 0, 1), (1, 2))]
    + [(drop, (0, 0)), (one_after_the_other, (0, 2, 1))],
)
def test_the_peak_of_a_step_is_the_allocators(subject: Predicted, step, picked: tuple[int, ...]) -> None:
    batches = [subject.batches[index] for index in picked]
    predictor = subject.engine.predictor
    for _ in range(2):
        predictor.largest_shapes = ()
        subject.model.zero_grad(set_to_none=True)
        peak, _, _ = allocated(lambda: step(subject.model, batches))
    footprints = [
        predictor.footprint(seen.sizes, None, False, seen.saved_before, seen.is_followed)
        for seen in predictor.largest_shapes
    ]
    assert max(part.other_forwards + part.activations for part in footprints) == pytest.approx(peak, **EXACT)
    assert predictor.peak(None) == max(part.peak for part in footprints)
    assert (max(part.other_forwards for part in footprints) > 0) == (step is contrast and len(picked) > 1)


def test_a_forward_is_pending_until_its_backward_has_run_or_its_graph_is_dropped() -> None:
    weight = torch.ones(3, requires_grad=True)
    pending, forward = Pending(), Forward({"rows": 3})
    loss, other = (weight * 2).sum(), (weight * 3).sum()
    pending.add(forward, {"loss": loss})
    pending.add(Forward({"rows": 4}), (other, [weight * 5]))
    pending.add(Forward({"rows": 5}), weight.detach())
    assert [forward.sizes["rows"] for forward in pending] == [3, 4]
    loss.backward()
    assert [forward.sizes["rows"] for forward in pending] == [4]
    earlier, discarded = pending.numbers, (weight * 6).sum()
    pending.add(Forward({"rows": 6}), discarded)
    pending.keep(earlier)
    assert [forward.sizes["rows"] for forward in pending] == [4]
    discarded.backward()
    del other
    gc.collect()
    assert list(pending) == []


def test_only_the_largest_forwards_count() -> None:
    small, wide, long = Forward({"a": 1, "b": 9}), Forward({"a": 3, "b": 1}), Forward({"a": 2, "b": 9})
    assert largest_shapes([long], small) == (long,)
    assert largest_shapes([long], Forward({"a": 3, "b": 9})) == (Forward({"a": 3, "b": 9}),)
    assert largest_shapes([long], wide) == (long, wide)
    later = Forward({"a": 2, "b": 9}, saved_before=5)
    assert largest_shapes([long], later) == (later,)
    assert largest_shapes([later], Forward({"a": 2, "b": 9}, is_followed=True)) == (
        later,
        Forward({"a": 2, "b": 9}, is_followed=True),
    )
