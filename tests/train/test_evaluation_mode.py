"""A model in evaluation mode, with dropout off, trains under its plan if gradients are enabled."""

import copy
from typing import Any

import pytest
import torch
from transformers import Trainer

from optimum_memopt import MemOptTrainer, optimize
from optimum_memopt.errors import MemOptError
from tests.gradients import assert_bitwise_same_step
from tests.model_zoo import SMALL
from tests.rotation import in_turn, nightly
from tests.small_model import WIDTH
from tests.trainer_runs import CLOSE, build, collate, distance, log_lines, make, rows, weights

NAME = "roberta-classification"
COMPILE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
LEVEL, BUDGET = {"memory_opt_level": 1}, {"memory_opt_budget": "16GiB"}
FROZEN = "running forwards of SmallForSequenceClassification in plain PyTorch: nothing in them trains"


@in_turn
def test_a_loop_trains_under_the_plan_in_both_modes() -> None:
    model = build(NAME, hidden_dropout_prob=0.5).eval()
    plain = copy.deepcopy(model)
    engine = optimize(model, memory_opt_level=1, **COMPILE)
    for step in range(4):
        batch = collate(rows(NAME, 4, seed=step))
        for each in (model, plain):
            each.train(step == 2)
            torch.manual_seed(step)
            each(**batch).loss.backward()
        assert engine.plans().enabled
    assert all(
        (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.nightly
def test_a_loop_is_refused_a_budget_that_nothing_fits() -> None:
    model = build(NAME).eval()
    optimize(model, memory_opt_budget="1MiB", **COMPILE)
    with pytest.raises(MemOptError, match="budget"):
        model(**collate(rows(NAME, 4)))


def test_a_forward_without_gradients_is_plain() -> None:
    model = build(NAME).train()
    engine = optimize(model, memory_opt_level=1, **COMPILE)
    with torch.no_grad():
        model(**collate(rows(NAME, 4)))
    assert engine.plans() is None


@pytest.mark.parametrize("plan", nightly([LEVEL, BUDGET], but=[BUDGET]), ids=["level", "budget"])
def test_a_forward_in_which_nothing_trains_is_plain(plan: dict[str, Any]) -> None:
    """A forward in which nothing trains is plain, as that of a reference model (the trained one without adapter)."""
    ours, plain, batch = SMALL.build("eager"), SMALL.build("eager"), SMALL.batch()
    engine = optimize(ours, **plan, **COMPILE)
    with log_lines() as lines:
        ours.requires_grad_(False)(**batch)
        assert engine.plans() is None
        for trains in (True, False, True):
            ours.requires_grad_(trains)
            plain.requires_grad_(trains)
            if trains:
                assert_bitwise_same_step(ours, plain, batch)
            else:
                assert torch.equal(ours(**batch).logits, plain(**batch).logits)
    assert lines.count(FROZEN) == 1
    assert not any("NOT under a plan" in line or "solving for the budget again" in line for line in lines)
    engine.detach()


@in_turn
def test_a_tensor_that_a_frozen_model_holds_may_train() -> None:
    model = SMALL.build("eager", repeats=True).requires_grad_(False)
    del model.scale
    model.scale = torch.ones(1, 1, WIDTH, requires_grad=True)
    engine = optimize(model, memory_opt_level=1, **COMPILE)
    gradients = []
    with log_lines() as lines:
        for _ in range(2):
            gradients += torch.autograd.grad(model(**SMALL.batch()).loss, model.scale)
    assert torch.equal(*gradients)
    assert engine.plans() is not None and FROZEN not in lines
    engine.detach()


class _Evaluates:
    def compute_loss(self, model, inputs, return_outputs=False, **others):
        model.eval()
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Plain(_Evaluates, Trainer):
    pass


class Ours(_Evaluates, MemOptTrainer):
    pass


@in_turn
def test_a_trainer_whose_compute_loss_switches_the_mode(tmp_path) -> None:
    plain = make(tmp_path / "plain", NAME, plain=True, trainer=Plain)
    ours = make(tmp_path / "ours", NAME, trainer=Ours, model=copy.deepcopy(plain.model), memory_opt_level=1, **COMPILE)
    plain.train()
    with log_lines() as lines:
        ours.train()
    assert distance(weights(ours.model), weights(plain.model)) < CLOSE
    assert ours.memopt.table.enabled
    assert not any("calls submodules of" in line for line in lines)


def test_onnx_runtime_trains_in_training_mode_alone_and_says_so() -> None:
    model = build("small").eval()
    plain = copy.deepcopy(model)
    engine = optimize(model, memory_opt_engine="ort", memory_opt_level=1)
    with log_lines() as lines:
        for _ in range(2):
            for each in (model, plain):
                each(**collate(rows("small", 4))).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert sum("ONNX Runtime trains only in training mode" in line for line in lines) == 1
    engine.check_used()
