"""The explanation of a step that ran out of memory matches the memory that the step held."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.explanations import FORWARD, FailedStep, place_of
from optimum_memopt.engines.api.predictions import SAVED
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.partition.producers.producer import TorchDefault
from optimum_memopt.engines.compile.predict import explain as explaining
from optimum_memopt.engines.compile.predict.explain import explain
from optimum_memopt.engines.compile.predict.reconstruction import capture_failed
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.logs import TimeIsUpError
from optimum_memopt.oom.report import forward_call, free_step
from optimum_memopt.sizes import Budget
from tests.compiled import hold_still
from tests.limited_memory import LimitedTensors
from tests.model_zoo import SDPA, ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_caveat import BrokenLoop, Output
from tests.train.test_layers import Perceptrons
from tests.trainer_runs import log_lines

ROWS, LENGTH = 16, 40


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()


def run_out(name: str, share: float, **changes: Any) -> tuple[FailedStep, LimitedTensors]:
    """Run a plain step with this share of the memory that it needs."""
    model, batch = ZOO[name].build("sdpa" if name in SDPA else "eager", **changes), ZOO[name].batch(ROWS, LENGTH)
    # A Trainer does the same.
    model.config.use_cache = False
    return run_out_with(model, batch, share)


def run_out_with(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], share: float, **known: Any
) -> tuple[FailedStep, LimitedTensors]:
    """Run out of memory with any model; `known` are fields of `FailedStep`."""
    with LimitedTensors() as free:
        step(model, batch)
    model.zero_grad(set_to_none=True)
    limited = LimitedTensors(int(share * free.peak))
    with pytest.raises(torch.OutOfMemoryError) as caught, limited:
        step(model, batch)
    place = place_of(caught.value.__traceback__, model)
    free_step(caught.value)
    del caught
    model.zero_grad(set_to_none=True)
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *batch.values()))
    fields = {
        "error": "",
        "model": model,
        "call": forward_call((), batch, ""),
        "place": place,
        "engine": None,
        "run": Run(),
    }
    fields |= {"held": tensors + limited.at_failure, "requested": limited.requested, "rows": ROWS, "accumulation": 1}
    fields |= {"kept": 0, "outside": 0, "accumulated": 0}
    return FailedStep(**fields | known), limited


CASES = [
    (name, share)
    for name in ("gpt2", "llama", "roberta-mlm", "deberta-v2-classification", "t5", "vit")
    for share in (0.3, 0.6, 0.9, 0.98)
] + [("qlora", 0.9), ("lora-experts", 0.9)]


# Models with one layer, which is traced in half the time.
ONE_LAYER = ("gpt2", "deberta-v2-classification")


@pytest.mark.parametrize(("name", "share"), nightly(CASES, but=[("gpt2", 0.98)]))
def test_the_parts_add_up_to_what_was_held(name, share):
    failed, limited = run_out(name, share, **({"num_hidden_layers": 1} if name in ONE_LAYER else {}))
    explained = explain(failed)
    told = sum(part.bytes for part in explained.parts)
    assert told == pytest.approx(limited.at_failure, rel=0.02)
    assert explained.moment.phase == failed.place.phase
    if share <= 0.3:
        assert explained.moment.phase == FORWARD
    saved = next(part for part in explained.parts if part.category == SAVED)
    assert sum(each.bytes for each in saved.tensors) == saved.bytes
    assert any(each.layers for each in saved.tensors)


@in_turn
@pytest.mark.parametrize("frozen", nightly([False, True], but=[False]), ids=["trained", "frozen"])
def test_a_graph_that_runs_several_times_counts_as_often(frozen):
    """A graph that runs for each layer, in a loop with graph breaks, counts as often as it runs."""
    model, batch = BrokenLoop(12), {"x": torch.randn(512, 64, requires_grad=frozen)}
    model.requires_grad_(not frozen)
    failed, limited = run_out_with(model, batch, 0.95, rows=512)
    forward = capture_failed(failed, TorchDefault(), "plain")
    assert max(forward.tape.runs) >= 11
    with LimitedTensors() as free:
        step(model, batch)
    assert forward.events(forward.first).peak() == pytest.approx(free.peak, rel=0.05)
    told = sum(part.bytes for part in explain(failed).parts)
    assert told == pytest.approx(limited.at_failure, rel=0.15)


@in_turn
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_alone_are_too_many_may_be_released(accumulation, monkeypatch):
    # Must succeed on a busy machine, too.
    monkeypatch.setattr(explaining, "_SECONDS", 600.0)
    # Ignores the memory of the process itself.
    for name in ("held_bytes", "room_to_grow"):
        monkeypatch.setattr(explaining, name, lambda *held: 0)
    model = Perceptrons(width=256)
    failed, _ = run_out_with(model, {"x": torch.randn(64, 256)}, 0.6, accumulation=accumulation)
    failed = replace(failed, run=Run(torch.optim.SGD(model.parameters(), lr=1e-3)))
    released = [each for each in explain(failed).suggestions if "--memory_opt_release_gradients" in each.flags]
    assert len(released) == (accumulation == 1)
    assert all(each.peak <= failed.held for each in released)


class WithReference(torch.nn.Module):
    """A model with a reference head that runs without gradients."""

    def __init__(self, requires_grad: bool) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2048)
        self.reference = torch.nn.Linear(64, 4096).requires_grad_(requires_grad)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.nn.functional.gelu(self.body(x))
        with torch.no_grad():
            expected = self.reference(x)[:, :2048]
        return Output(loss=(self.head(x) - expected).square().mean())


@in_turn
def test_parameters_without_a_gradient_have_neither_gradients_nor_states(monkeypatch):
    hold_still(monkeypatch)
    batch = {"x": torch.randn(512, 64)}
    by_run, footprints, floors = [], [], []
    for requires_grad in (True, False):
        model = WithReference(requires_grad)
        accumulating = Run(None, True)
        failed, _ = run_out_with(model, batch, 0.8, rows=512, run=accumulating, held=6 * 2**20)
        by_run.append([(suggestion.flags, suggestion.peak) for suggestion in explain(failed).suggestions])
        engine = CompileEngine(compiler="aot_eager")
        engine.attach(model)
        model(**batch).loss.backward()
        footprints.append(engine.predictor.footprint(gradient_accumulation=True))
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        assert footprints[-1].gradients == footprints[-1].accumulated == gradients
        assert footprints[-1].optimizer == 2 * gradients
        engine.detach()
        model.zero_grad()
        engine = CompileEngine(Selection(budget=Budget("1MiB", 2**20)), "aot_eager")
        engine.run = lambda run=accumulating: run
        engine.attach(model)
        with pytest.raises(DoesNotFitError) as caught:
            model(**batch)
        floors.append(str(caught.value))
        engine.detach()
    assert by_run[0] == by_run[1] and by_run[0]
    assert footprints[0] == footprints[1]
    assert floors[0] == floors[1]


def test_what_is_found_when_the_time_is_up_is_told(monkeypatch):
    failed, _ = run_out_with(WithReference(False), {"x": torch.randn(512, 64)}, 0.8, rows=512)
    complete = explain(failed)

    def takes_too_long(*args: Any) -> Any:
        raise TimeIsUpError
        yield

    monkeypatch.setattr("optimum_memopt.engines.compile.predict.explain.Search.within_budget", takes_too_long)
    partial = explain(failed)
    assert (partial.moment, partial.parts) == (complete.moment, complete.parts)
    assert partial.suggestions and set(partial.suggestions) <= set(complete.suggestions)
    assert partial.remarks == ("the search stopped after 15 seconds: other settings may fit, too",)
    monkeypatch.undo()
    monkeypatch.setattr("optimum_memopt.engines.compile.predict.explain._SECONDS", 0.001)
    with log_lines() as lines:
        traced = explain(failed)
    assert (traced.moment, traced.parts) == (complete.moment, complete.parts) and not traced.suggestions
    assert traced.remarks == ("the search stopped after 0 seconds: other settings may fit, too",)
    assert lines[0].startswith("analyzing the out-of-memory error: rerun on tensors without data")
    monkeypatch.undo()
    assert explain(failed) == complete
