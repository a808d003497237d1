"""A prediction that is not exact says why; one that says nothing is the allocator's."""

import pytest
import torch

from optimum_memopt.engines.compile.engine import CompileEngine
from optimum_memopt.engines.compile.memory.step_memory import stashed_of
from tests.engines.compile.compiled import selection
from tests.engines.compile.test_step_memory import EXACT, measured


class Output(dict):
    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Chain(torch.nn.Module):
    """Layers in three graphs, each of which reads what the one before returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 128) for _ in range(6))

    def part(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for layer in self.layers[first : first + 2]:
            x = torch.nn.functional.gelu(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> Output:
        x = self.part(x, 0)
        torch._dynamo.graph_break()
        x = self.part(x, 2)
        torch._dynamo.graph_break()
        return Output(loss=(self.part(x, 4) ** 2).sum())


class Convolution(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv1d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(loss=self.layer(x).tanh().sum())


def trained(model: torch.nn.Module, asked: str, x: torch.Tensor) -> CompileEngine:
    engine = CompileEngine(selection(asked), "aot_eager")
    engine.attach(model)
    model(x=x).loss.backward()
    return engine


@pytest.mark.parametrize("rows", [16, 200], ids=["weights", "activations"])
@pytest.mark.parametrize("asked", ["", "Gelu+:1:-1"])
def test_graphs_that_pass_on_to_one_another_are_exact_and_say_what_could_be_missing(asked: str, rows: int) -> None:
    model = Chain()
    engine = trained(model, asked, torch.randn(rows, 128))
    predictor = engine.predictor
    stashed, peak = measured(model, {"x": torch.randn(rows, 128)})
    assert stashed_of(predictor.graphs()) == predictor.saved() == pytest.approx(stashed, **EXACT)
    assert predictor.activations() == pytest.approx(peak, **EXACT)
    assert predictor.caveat == "not exact: 3 graphs, and what runs between them is not counted"
    assert f"({predictor.caveat})" in engine.plans().header[1]


def test_workspaces_of_convolutions_are_not_predicted() -> None:
    engine = trained(Convolution(), "", torch.randn(8, 4, 16))
    assert engine.predictor.caveat == "without the workspaces of convolutions"
    assert "(without the workspaces of convolutions)" in engine.plans().header[1]
