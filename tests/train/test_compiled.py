"""A plan that exceeds its budget after compilation is solved again; the first step takes effect only once."""

import itertools

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.predict import planner, step_predictor
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.sizes import Budget
from tests.compiled import hold_still
from tests.trainer_runs import log_lines


class Layers(torch.nn.Module):
    """Layers with dropout, and a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(64, 64) for _ in range(2))
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        for _ in range(3):
            x = functional.dropout(functional.gelu(self.first(x)), 0.1)
        for _ in range(3):
            x = functional.dropout(functional.gelu(self.second(x)), 0.1)
        return x.square().mean()


def trained(
    monkeypatch: pytest.MonkeyPatch, budget: int | None, compiles: int = 3
) -> tuple[CompileEngine, list, list]:
    hold_still(monkeypatch)
    monkeypatch.setattr(planner, "_MOST_COMPILES", compiles)
    torch.manual_seed(0)
    model = Layers()
    chosen = Selection(budget=None if budget is None else Budget(f"{budget} bytes", budget))
    engine = CompileEngine(chosen, "aot_eager", dynamic=False)
    engine.attach(model)
    torch.manual_seed(1)
    with log_lines() as lines:
        model(x=torch.randn(512, 64)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert model.forwards == 1
    return engine, gradients, lines


@pytest.fixture
def compiler_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    original = step_predictor.StepMemoryPredictor.activations
    monkeypatch.setattr(step_predictor.StepMemoryPredictor, "activations", lambda *args: original(*args) + 2**16)


def test_what_was_compiled_takes_more_than_was_solved_for(monkeypatch, compiler_takes_more: None) -> None:
    engine, expected, _ = trained(monkeypatch, None)
    free = engine.predictor.footprint()
    budget = free.peak - free.activations // 5
    engine.detach()
    engine, found, lines = trained(monkeypatch, budget)
    assert [line for line in lines if " MiB over the budget: solving again with a margin" in line]
    assert engine.predictor.footprint().peak <= budget
    assert "less a margin of" in engine.plans().header[0]
    assert all(map(torch.equal, found, expected))
    engine.detach()


def test_after_the_last_compile_it_is_a_warning(monkeypatch: pytest.MonkeyPatch, compiler_takes_more: None) -> None:
    engine, expected, _ = trained(monkeypatch, None)
    free = engine.predictor.footprint()
    engine.detach()
    engine, found, lines = trained(monkeypatch, free.peak - free.activations // 5, compiles=1)
    assert [line for line in lines if line.startswith("NOT within the budget: the compiled step takes ")]
    assert all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))
    engine.detach()
