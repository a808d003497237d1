"""A config with an id that the model lacks is refused before compilation, if that can be known by then."""

import pytest
import torch
import torch._inductor.compile_fx
from transformers.modeling_outputs import CausalLMOutput

from optimum_memopt import MemOptError, optimize
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.plans.grammar import ConfigError
from tests.rotation import in_turn

HIDDEN = 16


class Layer(torch.nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.act(self.inner(x)))


class OneGraph(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(torch.nn.functional.gelu), Layer(torch.tanh)

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        return CausalLMOutput(loss=self.second(self.first(x)).square().sum())


class TwoGraphs(OneGraph):
    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        x = self.first(x)
        torch._dynamo.graph_break()
        return CausalLMOutput(loss=self.second(x).square().sum())


class InnerFirst(OneGraph):
    """Nothing is traced before the break, so the first graph is entirely from an inner function."""

    def forward(self, x: torch.Tensor) -> CausalLMOutput:
        torch._dynamo.graph_break()
        x = self.first(x)
        torch._dynamo.graph_break()
        return CausalLMOutput(loss=self.second(x).square().sum())


def train(model: torch.nn.Module, config: str, compiler: str = "aot_eager"):
    engine = optimize(model, memory_opt_engine="compile", memory_opt_config=config, memory_opt_compiler=compiler)
    try:
        model(x=torch.randn(4, HIDDEN)).loss.backward()
        return engine.plans()
    finally:
        engine.detach()


@pytest.fixture
def compiled(monkeypatch) -> list[torch.fx.Graph]:
    graphs = []
    original = torch._inductor.compile_fx.compile_fx_inner

    def compile_fx_inner(module, *args, **kwargs):
        graphs.append(module.graph)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", compile_fx_inner)
    return graphs


@in_turn
@pytest.mark.skipif(not dynamo.inductor_works("cpu"), reason="there is no C++ compiler")
def test_a_typo_is_found_before_inductor_compiles(compiled):
    model = OneGraph()
    with pytest.raises(ConfigError, match=r'^no plan "Gellu\+" in this model; did you mean Gelu\+'):
        train(model, "Gellu+:1:-1", "inductor")
    assert compiled == []
    assert [plan.config for plan in train(model, "Gelu+:1:-1", "inductor").enabled] == ["Gelu+:1:-1"]
    assert len(compiled) == 2, "forward and backward"


@pytest.mark.parametrize("kind", [OneGraph, TwoGraphs, InnerFirst])
def test_an_id_may_be_in_any_graph_and_has_to_be_in_one(kind):
    torch._dynamo.reset()
    model = kind()
    table = train(model, "Gelu+:1:-1,Gemm+Tanh+:1:-1")
    assert {plan.config for plan in table.enabled} == {"Gelu+:1:-1", "Gemm+Tanh+:1:-1"}
    with pytest.raises(MemOptError, match=r'^no plan "Gellu\+" in this model') as caught:
        train(model, "Gemm+Tanh+:1:-1,Gellu+:1:-1")
    assert type(caught.value) is ConfigError and str(caught.value).isprintable()
    assert {plan.config for plan in train(model, "Gemm+Tanh+:1:-1").enabled} == {"Gemm+Tanh+:1:-1"}
