import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.graph.saved_activations import operator_name
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat.fx_graph import is_random
from tests.captured import Captured, capture

X = torch.linspace(-1, 1, 6 * 8).view(6, 8)


class Twice(torch.nn.Module):
    """Two projections of one tensor under autocast, two draws, two constants, and an output that is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.input = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.input(x).tanh()
        with torch.autocast("cpu", torch.bfloat16):
            product = self.first(hidden) * self.second(hidden)
        product = product + torch.rand(6, 8) * torch.rand(6, 8) + torch.zeros(6, 8).sin() + torch.zeros(6, 8).sin()
        return (product * hidden.exp()).sum(), hidden.exp()


@pytest.fixture(scope="module")
def twice() -> Captured:
    return capture(Twice().forward, X)


def count(captured: Captured, name: str) -> int:
    return sum(operator_name(node) == name for node in captured.joint.forward)


def test_a_cast_is_made_once(twice):
    before = [node for node in twice.module.graph.nodes if node.op == "call_function"]
    casts = [node for node in before if operator_name(node) == "_to_copy" and str(node.args[0]) == "tanh"]
    assert len(casts) == 2
    after = {node.name for node in twice.joint.nodes}
    assert casts[0].name in after and casts[1].name not in after


def test_draws_constants_and_outputs_stay(twice):
    assert count(twice, "rand") == 2
    assert count(twice, "zeros") == 2
    assert count(twice, "exp") == 2, "the caller may write to the one that it gets"


def test_gradients_stay_bitwise():
    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model(X)[0].backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, ours = Twice(), Twice()
    ours.load_state_dict(plain.state_dict())
    engine = CompileEngine(compiler="aot_eager")
    engine.attach(ours)
    assert all(map(torch.equal, gradients(plain), gradients(ours)))
    engine.detach()


class Attention(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(8, 8), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).view(1, 600, 2, 4).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=self.dropout).sum()


def test_attention_without_dropout_draws_nothing():
    captured = capture(Attention(0.0).forward, X.repeat(100, 1))
    (attention,) = (node for node in captured.joint.forward if "scaled_dot_product" in str(node.target))
    assert torch.Tag.nondeterministic_seeded in attention.target.tags
    assert not is_random(attention)
    assert captured.configs["Attention+:1:-1"] == 1, "its row statistics are saved"
    attention.update_kwarg("dropout_p", 0.1)
    assert is_random(attention)
