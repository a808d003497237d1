"""Requested activation checkpointing is replaced by a plan while an engine trains, and restored afterwards."""

import pytest
import torch
import transformers
from packaging.version import Version

from optimum_memopt import optimize
from tests.gradients import accumulate
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.small_model import WIDTH, Block
from tests.train.test_caveat import Output
from tests.train.test_layers import Perceptrons
from tests.train.test_step_memory import EXACT, measured
from tests.trainer_runs import CLOSE, build, distance, log_lines, make, weights

NAME = "roberta-classification"


def replaced(lines):
    return [line for line in lines if line.startswith("activation checkpointing of ")]


def input_gradient_hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("asked", nightly(["arguments", "model-before", "model-after"], but=["arguments"]))
def test_a_trainer_recomputes_by_level_1_instead(tmp_path, engine, asked):
    """A Trainer recomputes by level 1 instead of checkpointing, and train() restores the state of a plain Trainer."""
    changes = {"gradient_checkpointing": True} if asked == "arguments" else {}
    plain = make(tmp_path / "plain", NAME, plain=True, **changes)
    model = build(NAME)
    if asked == "model-before":
        model.gradient_checkpointing_enable()
    ours = make(tmp_path / "ours", NAME, model=model, memory_opt_engine=engine, **changes)
    if asked == "model-after":
        model.gradient_checkpointing_enable()
    for _ in range(2):
        plain.train()
        with log_lines() as lines:
            ours.train()
        (line,) = replaced(lines)
        assert f"is off while the {engine} engine trains it; level 1 recomputes instead" in line
        assert distance(weights(model), weights(plain.model)) < CLOSE
        assert len(ours.memopt.table.enabled) > 2
        assert model.is_gradient_checkpointing and ours.args.gradient_checkpointing == (asked == "arguments")
    if asked == "arguments":
        assert input_gradient_hooks(model) == input_gradient_hooks(plain.model) > 0


def test_a_plan_stays_the_plan(tmp_path, engine):
    with log_lines() as lines:
        trainer = make(
            tmp_path, NAME, memory_opt_engine=engine, gradient_checkpointing=True, memory_opt_config="Gelu+:1:-1"
        )
        trainer.train()
    assert [plan.config for plan in trainer.memopt.table.enabled] == ["Gelu+:1:-1"]
    (line,) = replaced(lines)
    assert "config Gelu+:1:-1 recomputes instead" in line


@in_turn
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.17"), reason="offload came with 5.17")
@pytest.mark.parametrize(
    "asked, said", nightly([({"offload": True}, 1), ({"use_reentrant": False}, 0)], but=[({"offload": True}, 1)])
)
def test_a_lost_offload_is_said(tmp_path, asked, said):
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": asked}
    with log_lines() as lines:
        make(tmp_path, NAME, memory_opt_engine="compile", max_steps=1, **changes).train()
    assert sum("its offload is off too" in line and "--memory_opt_budget" in line for line in lines) == said


@in_turn
def test_a_model_that_is_switched_on_in_the_middle(engine):
    model, plain, batch = build(NAME), build(NAME), ZOO[NAME].batch()
    trained = optimize(model, memory_opt_engine=engine)
    model(**batch).loss.backward()
    assert not trained.plans().enabled
    for each in (model, plain):
        each.zero_grad()
        each.gradient_checkpointing_enable()
        each(**batch).loss.backward()
    assert trained.plans().enabled and not model.is_gradient_checkpointing
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-6)
    trained.detach()
    assert model.is_gradient_checkpointing and input_gradient_hooks(model) == input_gradient_hooks(plain)
    model.disable_input_require_grads()
    assert input_gradient_hooks(model) == 0, "the handle still finds its hook"


class Checkpointed(torch.nn.Module):
    """Layers that always checkpoint a part of themselves, with dropout."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)

        def inner(self, x):
            return self.drop(torch.nn.functional.gelu(self.linear(x)))

        def forward(self, x):
            return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class InSegments(torch.nn.Module):
    """Layers that the model checkpoints in segments, with torch's graph breaks between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Block() for _ in range(6))
        self.head = torch.nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint_sequential(list(self.layers), 3, x, use_reentrant=False)
        return {"loss": self.head(x).square().mean()}


@in_turn
@pytest.mark.parametrize(
    "plan",
    nightly([{"memory_opt_level": 1}, {"memory_opt_budget": "8GiB"}, {}], but=[{"memory_opt_level": 1}]),
    ids=["level", "budget", "none"],
)
def test_checkpoints_of_ones_own_around_layers_train_in_a_loop(plan):
    model, plain = InSegments(), InSegments()
    optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", **plan)
    with log_lines() as lines:
        for length in (5, 6):
            x = torch.randn(3, length, WIDTH)
            for each in (model, plain):
                each(x)["loss"].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert sum(line.startswith("running layers under torch.utils.checkpoint in plain PyTorch") for line in lines) == 1


@in_turn
@pytest.mark.parametrize("unit", ["layer", "model"])
def test_layers_that_checkpoint_themselves_train_within_a_budget(unit):
    model, x, found = Checkpointed(), torch.randn(4, 8), []
    options = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_unit": unit}
    trained = optimize(model, memory_opt_budget="100GiB", **options)
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        model(x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        trained.detach()
    assert all(map(torch.equal, *found))


class EverySecond(Perceptrons):
    """Checkpoints every second layer; torch saves a generator state, with its own symbolic size, for each of them."""

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if place % 2 else layer(x)
        return Output(loss=x.square().mean())


@in_turn
def test_a_step_that_saves_the_states_of_generators_is_predicted():
    model = EverySecond(dropout=0.1)
    trained = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager")
    for rows in (512, 256):
        batch = {"x": torch.randn(rows, 32)}
        accumulate(model, [batch])
        _, peak = measured(model, batch)
        assert trained.predictor.activations(trained.predictor.sizes_of(batch)) == pytest.approx(peak, **EXACT)
    trained.detach()
