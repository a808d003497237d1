"""A model in evaluation mode, with dropout off, trains under its plan: enabled gradients are what counts."""

import copy

import pytest
import torch
from transformers import Trainer

from optimum_memopt import MemOptTrainer, optimize
from optimum_memopt.errors import MemOptError
from tests.rotation import in_turn
from tests.trainer_runs import CLOSE, build, collate, distance, log_lines, make, rows, weights

NAME = "roberta-classification"
COMPILE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}


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
    assert not any("calls parts of" in line for line in lines)


def test_onnx_runtime_trains_in_training_mode_alone_and_says_so() -> None:
    model = build("small").eval()
    plain = copy.deepcopy(model)
    engine = optimize(model, memory_opt_engine="ort", memory_opt_level=1)
    with log_lines() as lines:
        for _ in range(2):
            for each in (model, plain):
                each(**collate(rows("small", 4))).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert sum("ONNX Runtime trains in training mode alone" in line for line in lines) == 1
    engine.check_used()
