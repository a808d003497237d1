"""Several training forwards before one backward, predicted against what torch's allocator is asked for."""

import gc
from collections.abc import Iterator

import pytest
import torch

from optimum_memopt.engines.compile.predict.step_predictor import Forward, Pending, largest_shapes
from tests.gradients import Batch
from tests.rotation import nightly
from tests.train.test_step_memory import EXACT, Predicted, allocated, predicted

# In the first model activations are most of a step, in the second weights are.
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
    [
        (contrast, (0,)),
        (contrast, (0, 0)),
        (contrast, (0, 0, 0)),
        (contrast, (2, 0, 1)),
        (contrast, (1, 2)),
        (drop, (0, 0)),
        (one_after_the_other, (0, 2, 1)),
    ],
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
    assert predictor.peak(None, False) == max(part.peak for part in footprints)
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
