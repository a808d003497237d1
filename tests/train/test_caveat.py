"""A prediction that is not exact has a caveat; one without a caveat equals the allocator's peak."""

import pytest
import torch

from optimum_memopt.engines.compile.train.engine import CompileEngine
from tests.compiled import selection
from tests.rotation import nightly
from tests.train.test_step_memory import EXACT, measured


class Output(dict):
    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Chain(torch.nn.Module):
    """Layers in three graphs, each of which reads the outputs of the one before."""

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


class ChunkedLoss(torch.autograd.Function):
    """The sum of squares of a projection in chunks, like the loss of TRL's SFTTrainer; breaks the graph."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        torch._dynamo.graph_break()
        return torch.stack([(chunk @ weight.T).square().sum() for chunk in x.split(8)]).sum()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        logits = x @ weight.T
        return 2 * gradient * logits @ weight, 2 * gradient * logits.T @ x


class LanguageModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 1000, bias=False)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(loss=ChunkedLoss.apply(torch.nn.functional.gelu(self.layer(x)), self.head.weight))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class BrokenLoop(torch.nn.Module):
    """A graph break in the loop over layers, so torch compiles each layer alone: all have the same graph except the
    first, whose input needs no gradient."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> Output:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return Output(loss=x.sum())


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
@pytest.mark.parametrize("asked", nightly(["", "Gelu+:1:-1"], but=["Gelu+:1:-1"]))
def test_graphs_that_pass_on_to_one_another_are_exact_and_say_what_could_be_missing(asked: str, rows: int) -> None:
    model = Chain()
    engine = trained(model, asked, torch.randn(rows, 128))
    predictor = engine.predictor
    saved, peak = measured(model, {"x": torch.randn(rows, 128)})
    assert predictor.saved() == pytest.approx(saved, **EXACT)
    assert predictor.activations() == pytest.approx(peak, **EXACT)
    assert predictor.caveat == "not exact: 3 graphs, and code outside of them is not counted"
    assert f"({predictor.caveat})" in engine.plans().header[1]


def test_workspaces_of_convolutions_are_not_predicted() -> None:
    engine = trained(Convolution(), "", torch.randn(8, 4, 16))
    assert engine.predictor.caveat == "without the workspaces of convolutions"
    assert "(without the workspaces of convolutions)" in engine.plans().header[1]


def test_a_loss_outside_of_the_only_graph_is_not_exact() -> None:
    engine = trained(LanguageModel(), "", torch.randn(64, 32))
    caveat = engine.predictor.caveat
    assert caveat == "not exact: 1 graph, and code outside of it is not counted"
    assert f"({caveat})" in engine.plans().header[1]


@pytest.mark.parametrize("asked", nightly(["", "Gelu+:1:-1"], but=["Gelu+:1:-1"]))
def test_a_graph_that_layers_share_counts_as_often_as_it_runs(asked: str) -> None:
    model = BrokenLoop(3)
    engine = trained(model, asked, torch.randn(200, 64))
    predictor = engine.predictor
    saved, peak = measured(model, {"x": torch.randn(200, 64)})
    assert predictor.caveat == "not exact: 2 graphs in 3 runs, and code outside of them is not counted"
    assert predictor.saved() == pytest.approx(saved, **EXACT)
    assert predictor.activations() == pytest.approx(peak, **EXACT)


class Products(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(loss=self.layer(x).square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_half_precision_on_a_cpu(dtype: torch.dtype) -> None:
    engine = CompileEngine(compiler="aot_eager")
    model = Products()
    engine.attach(model)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        model(x=torch.randn(4, 16)).loss.backward()
    is_half = dtype is torch.bfloat16
    expected = "without the memory that oneDNN keeps for each shape in half precision" if is_half else ""
    assert engine.predictor.caveat == expected
    engine.detach()
