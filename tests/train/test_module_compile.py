"""`Module.compile` and `torch.compile` by the user: they are off while the engine compiles the model itself."""

from collections.abc import Iterable

import pytest
import torch

from optimum_memopt import optimize
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import assert_same_step
from tests.model_zoo import SMALL
from tests.rotation import in_turn
from tests.trainer_runs import distance, log_lines, make, weights

OPTIONS = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
LINE = "Module.compile of {} is off while the compile engine trains SmallForSequenceClassification"


def compiled(modules: Iterable[torch.nn.Module]) -> None:
    for module in modules:
        module.compile(backend="eager")


@pytest.mark.parametrize("unit", ["layer", pytest.param("model", marks=in_turn)])
def test_a_level_recomputes_in_layers_that_the_user_compiled(unit):
    model, plain = SMALL.build("eager").train(), SMALL.build("eager").train()
    for each in (model, plain):
        each.layer.append(type(each.layer[0])())
        each.layer[1].load_state_dict(model.layer[0].state_dict())
    compiled(model.layer)
    before = [vars(layer)["_compiled_call_impl"] for layer in model.layer]
    with log_lines() as lines:
        engine = optimize(model, memory_opt_level=1, memory_opt_unit=unit, **OPTIONS)
        assert_same_step(model, plain, SMALL.batch(), tolerance=0)
    assert sum(LINE.format("layer.0 and 1 more") in line for line in lines) == 1
    assert {"Gelu+:1:-1": 2}.items() <= {row.config: row.applied_count for row in engine.plans().enabled}.items()
    engine.detach()
    assert [vars(layer)["_compiled_call_impl"] for layer in model.layer] == before


@in_turn
@pytest.mark.parametrize("which", ["model", "layer", "wrapper"])
def test_what_is_compiled_after_the_engine_was_attached(which):
    model, plain = SMALL.build("eager").train(), SMALL.build("eager").train()
    engine = optimize(model, memory_opt_level=1, **OPTIONS)
    called = model
    if which == "wrapper":
        called = torch.compile(model, backend="eager")
    else:
        compiled([model] if which == "model" else model.layer)
    for batch in (SMALL.batch(), SMALL.batch(seed=1)):
        called(**batch).loss.backward()
        plain(**batch).loss.backward()
    assert all(
        torch.equal(ours.grad, other.grad) for ours, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert "Gelu+:1:-1" in [row.config for row in engine.plans().enabled]
    engine.detach()


def test_a_trainer_restores_it_after_each_run(tmp_path):
    plain = make(tmp_path / "plain", "small", plain=True)
    ours = make(tmp_path / "ours", "small", memory_opt_level=1, **OPTIONS)
    compiled(ours.model.layer)
    before = vars(ours.model.layer[0])["_compiled_call_impl"]
    for _ in range(2):
        plain.train()
        with log_lines() as lines:
            ours.train()
        assert any(LINE.format("layer.0") in line for line in lines)
        assert distance(weights(ours.model), weights(plain.model)) == 0
        assert vars(ours.model.layer[0])["_compiled_call_impl"] is before
    assert "Gelu+:1:-1" in [row.config for row in ours.memopt.table.enabled]


def test_what_torch_compile_returned_is_no_model():
    with pytest.raises(UnsupportedModelError, match="pass the model itself"):
        optimize(torch.compile(SMALL.build("eager"), backend="eager"), memory_opt_level=1, **OPTIONS)
