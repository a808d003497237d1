"""A forward with several graphs under a budget; torch compiles and runs each graph before it traces the next one."""

import re
import weakref
from collections import UserList
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from optimum_memopt import plan
from optimum_memopt.engines.api.predictions import StepEstimate
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.predict.estimate import estimate
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.predict.workload import ModuleWorkload
from optimum_memopt.sizes import Budget
from optimum_memopt.step_settings import StepSpec
from tests.compiled import hold_still
from tests.rotation import in_turn, nightly
from tests.train.test_caveat import BrokenLoop, Output
from tests.train.test_step_memory import measured
from tests.trainer_runs import log_lines

MIB = 2**20
# Bytes that are allocated besides the graph's tensors: the loss, seeds.
SLACK = 256


class InPieces(torch.nn.Module):
    """Layers in several graphs, with dropout and a buffer that each forward changes."""

    def __init__(self, breaks: int, layers: int = 2, width: int = 128) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers)) for _ in range(breaks + 1)
        )
        self.register_buffer("forwards", torch.zeros(()))

    def part(self, x: torch.Tensor, number: int) -> torch.Tensor:
        for layer in self.parts[number]:
            x = functional.dropout(functional.gelu(layer(x)), 0.1)
        return x

    def forward(self, x: torch.Tensor) -> Output:
        self.forwards += 1
        x = self.part(x, 0)
        if len(self.parts) > 1:
            torch._dynamo.graph_break()
            x = self.part(x, 1)
        if len(self.parts) > 2:
            torch._dynamo.graph_break()
            x = self.part(x, 2)
        if len(self.parts) > 3:
            torch._dynamo.graph_break()
            x = self.part(x, 3)
            torch._dynamo.graph_break()
            x = self.part(x, 4)
            torch._dynamo.graph_break()
            x = self.part(x, 5)
        return Output(loss=x.square().mean())


MODELS = {
    "one break": lambda: InPieces(1),
    "two breaks": lambda: InPieces(2),
    "five breaks": lambda: InPieces(5, layers=3),
    "a loop": lambda: BrokenLoop(6),
}
WIDTHS = {"one break": 128, "two breaks": 128, "five breaks": 128, "a loop": 64}
ROWS = 1024


@pytest.fixture
def steady_process(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)


def attached(name: str, budget: int | None, dynamic: bool = False) -> CompileEngine:
    torch.manual_seed(0)
    chosen = Selection(budget=None if budget is None else Budget(f"{budget} bytes", budget))
    engine = CompileEngine(chosen, "aot_eager", dynamic, unit="model")
    engine.attach(MODELS[name]())
    return engine


def batch_of(name: str, rows: int = ROWS) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(rows, WIDTHS[name])}


def gradients(engine: CompileEngine, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(2)
    engine._model(**batch).loss.backward()
    return [parameter.grad for parameter in engine._model.parameters()]


def test_each_graph_break_is_named_with_its_line() -> None:
    engine = attached("two breaks", None)
    with log_lines() as lines:
        engine._model(**batch_of("two breaks"))
    (line,) = (line for line in lines if "planned together" in line)
    places = re.findall(rf", at {re.escape(__file__)}:(\d+), in forward", line)
    code = Path(__file__).read_text().splitlines()
    assert [code[int(place) - 1].strip() for place in places] == ["torch._dynamo.graph_break()"] * 2
    assert len(set(places)) == 2
    engine.detach()


def assert_within(name: str, budget: int, expected: list[torch.Tensor]) -> tuple[int, list[str]]:
    """Check that a step is plain PyTorch's and within the budget; returns the predicted peak and lines about room."""
    batch, engine = batch_of(name), attached(name, budget)
    with log_lines() as lines:
        found = gradients(engine, batch)
    assert all(map(torch.equal, found, expected))
    assert getattr(engine._model, "forwards", 1) == 1
    predicted = engine.predictor.footprint()
    _, peak = measured(engine._model, batch)
    engine.detach()
    assert predicted.peak <= budget
    assert predicted.peak - predicted.activations + peak <= budget + SLACK
    assert not [line for line in lines if line.startswith("NOT within")]
    return predicted.peak, [line for line in lines if "again" in line]


def without_plan(name: str) -> tuple[list[torch.Tensor], Footprint]:
    engine = attached(name, None)
    found = gradients(engine, batch_of(name)), engine.predictor.footprint()
    engine.detach()
    return found


# The last share of each case is close to the floor.
@pytest.mark.parametrize(
    ("name", "shares"),
    nightly(
        [("one break", (0.7, 0.62)), ("two breaks", (0.6, 0.5)), ("five breaks", (0.6, 0.32)), ("a loop", (0.6, 0.4))],
        but=["a loop"],
    ),
    ids=MODELS,
)
def test_graphs_that_do_not_fit_one_by_one_fit_together(steady_process, name: str, shares: tuple[float, ...]) -> None:
    expected, free = without_plan(name)
    budgets = [int(free.peak - (1 - share) * free.activations) for share in shares]
    found = [assert_within(name, budget, expected) for budget in budgets]
    assert found[1][0] < found[0][0]
    # The first forward reveals all graphs, so nothing is solved again.
    assert not any(lines for _, lines in found)


def floor_in(error: DoesNotFitError) -> int:
    """Returns the floor in the error's text, which is rounded up, in bytes."""
    (number,) = re.findall(r"peaks at ([\d.]+) MiB", str(error))
    return int(float(number) * MIB)


@pytest.mark.parametrize("name", nightly(list(MODELS)))
def test_an_error_names_a_floor_that_is_enough_for_the_graphs_so_far(steady_process: None, name: str) -> None:
    expected, free = without_plan(name)
    # With five breaks a plan exists for as little as 0.32 of the activations.
    budget, errors = free.peak - int((0.9 if name == "five breaks" else 0.65) * free.activations), []
    while len(errors) < 6:
        engine = attached(name, budget)
        try:
            with log_lines() as lines:
                engine._model(**batch_of(name))
            break
        except DoesNotFitError as error:
            errors.append(lines)
            assert floor_in(error) >= budget
            budget = floor_in(error)
        finally:
            engine.detach()
    assert_within(name, budget, expected)


@pytest.mark.nightly
def test_a_batch_that_is_said_to_fit_does_in_all_graphs(steady_process: None) -> None:
    engine = attached("one break", None, dynamic=True)
    engine._model(**batch_of("one break"))
    free = engine.predictor.footprint()
    engine.detach()
    budget = free.peak - int(0.65 * free.activations)
    engine = attached("one break", budget, dynamic=True)
    with pytest.raises(DoesNotFitError) as refused:
        engine._model(**batch_of("one break"))
    engine.detach()
    (rows,) = re.findall(r"use --per_device_train_batch_size (\d+) ", str(refused.value))
    engine = attached("one break", budget, dynamic=True)
    engine._model(**batch_of("one break", int(rows)))
    assert engine.predictor.footprint().peak <= budget
    engine.detach()


class Watched(InPieces):
    """A model whose graph break is a user's function."""

    def __init__(self) -> None:
        super().__init__(1)
        # Not Python lists, which are restored after an attempt.
        self.looked = SimpleNamespace(seen=UserList(), alive=UserList())

    @torch._dynamo.disable
    def look_at(self, x: torch.Tensor) -> None:
        self.looked.alive.append(sum(seen() is not None for seen in self.looked.seen))
        self.looked.seen.append(weakref.ref(x))

    def forward(self, x: torch.Tensor) -> Output:
        x = self.part(x, 0)
        self.look_at(x)
        return Output(loss=self.part(x, 1).square().mean())


@in_turn
def test_what_a_try_has_saved_is_gone_in_the_next_one(steady_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, free = without_plan("one break")
    monkeypatch.setitem(MODELS, "one break", Watched)
    engine = attached("one break", free.peak - int(0.4 * free.activations))
    engine._model(**batch_of("one break"))
    assert engine._model.looked.alive == [0, 0]
    assert re.search(r", budget .*, in 2 graphs$", engine.plans().header[0])
    engine.detach()


@in_turn
@pytest.mark.parametrize("share", nightly([0.6, 0.42], but=[0.42]))
def test_a_step_that_is_only_planned_fits_in_all_graphs(share: float) -> None:
    """A planned step fits in all graphs, although nothing runs and earlier graphs' activations are not in memory."""
    how = {"example_inputs": batch_of("two breaks"), "device": "h100", "compiler": "aot_eager"}
    free = plan(InPieces(2), **how)
    budget = free.peak - int((1 - share) * free.breakdown["activations"])
    assert plan(InPieces(2), budget=f"{budget / MIB:.3f}MiB", **how).peak <= budget


def estimated(budget: int | None = None) -> StepEstimate:
    selection = Selection(budget=None if budget is None else Budget(f"{budget} bytes", budget))
    # With one layer, ten budgets are solved in half the time.
    workload = ModuleWorkload.of(InPieces(1, layers=1), batch_of("one break"), None, ())
    return estimate(workload, selection, StepSpec("h100", "aot_eager"), with_curve=True)


@pytest.mark.nightly
def test_a_curve_is_that_of_all_graphs() -> None:
    found = estimated()
    assert found.frontier is not None
    curve = found.frontier.points
    times = [point.extra_seconds for point in curve]
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == 0
    assert curve[-1].peak == pytest.approx(found.peak_mib * MIB, rel=0.01)
    assert all(point.peak <= point.budget for point in curve)
    point = curve[4]
    run = estimated(point.budget)
    assert run.peak_mib * MIB <= point.budget
    assert run.frontier is not None and run.frontier.chosen == point


@in_turn
def test_a_run_has_the_curve_of_all_graphs(steady_process: None) -> None:
    engine = CompileEngine(Selection(budget=Budget("1GiB", 2**30)), "aot_eager", dynamic=False, with_frontier=True)
    engine.attach(MODELS["one break"]())
    engine._model(**batch_of("one break"))
    frontier = engine.frontier()
    assert frontier.points[-1].peak == pytest.approx(engine.predictor.footprint().peak, rel=0.01)
    engine.detach()


@pytest.mark.nightly
def test_the_largest_batch_is_that_of_all_graphs() -> None:
    how = {"device": "h100", "compiler": "aot_eager"}
    most = plan(InPieces(1), example_inputs=batch_of("one break", 64), **how, budget="1GiB").largest_batch("1GiB")
    assert plan(InPieces(1), example_inputs=batch_of("one break", most), **how, budget="1GiB").peak <= 2**30
    with pytest.raises(DoesNotFitError):
        plan(InPieces(1), example_inputs=batch_of("one break", most + most // 50), **how, budget="1GiB")


@pytest.mark.nightly
def test_an_offloaded_input_of_the_last_graph_is_reloaded_when_its_backward_begins() -> None:
    """An offloaded input is reloaded as its backward begins; an earlier copy would exceed the budget and re-plan."""
    step = {"example_inputs": batch_of("one break", 200_000), "device": "h100", "compiler": "aot_eager"}
    with log_lines() as lines:
        found = plan(InPieces(1), **step, budget="600MiB")
        with pytest.raises(DoesNotFitError):
            plan(InPieces(1), **step, budget="560MiB")
    assert not [line for line in lines if "over the budget" in line]
    assert 560 * 2**20 < found.peak <= 600 * 2**20
