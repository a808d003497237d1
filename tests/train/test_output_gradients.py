"""A loop that only backpropagates the loss holds no zero gradients for logits; a loop that reads these gets theirs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimum_memopt import optimize
from optimum_memopt.engines.compile.options import LAYER, MODEL
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import dynamo
from tests.gradients import TOLERANCE, Gradients, wrong_gradients
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_step_memory import measured
from tests.trainer_runs import log_lines

LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "loss": lambda outputs: outputs.loss,
    "logits": lambda outputs: outputs.logits.square().mean(),
    "both": lambda outputs: outputs.loss + outputs.logits.square().mean(),
}
MIXED = "loss both loss logits"
OTHER_GRAPH = "compiling another training graph: outputs other than the loss have gradients"


def attached(model: torch.nn.Module, compiler: str, unit: str = LAYER) -> CompileEngine:
    options = {"memory_opt_engine": "compile", "memory_opt_loss": "plain", "memory_opt_level": 1}
    engine = optimize(model, memory_opt_compiler=compiler, memory_opt_unit=unit, **options)
    assert isinstance(engine, CompileEngine)
    return engine


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor], kind: str) -> Gradients:
    model.zero_grad(set_to_none=True)
    LOSSES[kind](model(**batch)).backward()
    return {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}


def twins(**changes: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = ZOO["llama"].build(num_hidden_layers=4, use_cache=False, **changes).train()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("unit", nightly([LAYER, MODEL], but=[LAYER]))
@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
@pytest.mark.parametrize("kinds", nightly([MIXED, "logits loss"], but=[MIXED]))
def test_gradients_are_those_of_plain_pytorch(compiler: str, unit: str, kinds: str) -> None:
    if compiler == "inductor" and not dynamo.inductor_works("cpu"):
        pytest.skip("there is no C++ compiler")
    model, plain = twins()
    attached(model, compiler, unit)
    with log_lines() as lines:
        for seed, kind in enumerate(kinds.split()):
            batch = ZOO["llama"].batch(3, 9 + seed, seed=seed)
            ours, expected = gradients(model, batch, kind), gradients(plain, batch, kind)
            for name, gradient in expected.items():
                if compiler == "aot_eager":
                    assert torch.equal(ours[name], gradient), (kind, name)
                else:
                    torch.testing.assert_close(ours[name], gradient, rtol=TOLERANCE, atol=TOLERANCE)
    assert sum(line.startswith(OTHER_GRAPH) for line in lines) == 1


@in_turn
def test_router_logits_of_experts_are_outputs() -> None:
    """Gradients of router logits are exact: recompute waits for their sum; the layers compile with the model."""
    torch.manual_seed(0)
    model = ZOO["mixtral"].build(num_hidden_layers=2, use_cache=False, output_router_logits=True).train()
    plain = copy.deepcopy(model)
    engine = attached(model, "aot_eager", MODEL)
    for seed, kind in enumerate(("loss", "both", "loss")):
        batch = ZOO["mixtral"].batch(3, 9, seed=seed)
        ours, expected = gradients(model, batch, kind), gradients(plain, batch, kind)
        assert wrong_gradients(ours, expected) == {}
    assert "level 1" in engine.plans().header[0]


def test_a_graph_that_is_kept_has_both_gradients() -> None:
    model, plain = twins()
    attached(model, "aot_eager")
    batch = ZOO["llama"].batch(3, 9)
    found = []
    for one in (model, plain):
        outputs, weight = one(**batch), one.lm_head.weight
        of_logits = torch.autograd.grad(outputs.logits.sum(), weight, retain_graph=True)
        found.append((*of_logits, *torch.autograd.grad(outputs.loss, [weight, one.model.embed_tokens.weight])))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("unit", nightly([LAYER, MODEL], but=[LAYER]))
def test_no_zeros_are_held(unit: str) -> None:
    """No zero gradients are held: under level 1 the peak, where the logits' gradient is computed, has none."""
    model, plain = twins(vocab_size=2048)
    engine = attached(model, "aot_eager", unit)
    batch = ZOO["llama"].batch(4, 32)
    for one in (model, plain):
        measured(one, batch)
    (_, peak), (_, without_engine) = measured(model, batch), measured(plain, batch)
    assert engine.predictor is not None
    assert abs(engine.predictor.footprint().activations - peak) <= 64
    assert peak < without_engine


def test_other_outputs_with_gradients_are_no_losses() -> None:
    """Gradients of hidden states, which are sums of layers' outputs, are added to those that the layers get."""
    model, plain = twins()
    attached(model, "aot_eager")
    batch = {**ZOO["llama"].batch(3, 9), "output_hidden_states": True}
    for one in (model, plain):
        outputs = one(**batch)
        (outputs.loss + outputs.hidden_states[2].square().mean()).backward()
    ours, expected = ({name: each.grad for name, each in one.named_parameters()} for one in (model, plain))
    assert wrong_gradients(ours, expected) == {}
