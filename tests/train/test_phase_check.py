"""The check of a run's other phases before its first step under a budget."""

import copy
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather

from optimum_memopt import MemOptError
from optimum_memopt.engines.simulator import user_step
from optimum_memopt.memory.capacity import Capacity
from optimum_memopt.predict.phases import RunPhase, host_suggestions
from optimum_memopt.training import compat_dry_run, fake_run
from optimum_memopt.training.fake_run import left_as_it_is
from tests.rotation import in_turn
from tests.trainer_runs import build, distance, log_lines, make, rows, weights

BUDGET = {"memory_opt_engine": "compile", "memory_opt_loss": "plain", "max_steps": 1}
MANY = rows("small", 16) * 4_000
METRICS = {"compute_metrics": lambda _: {}}
# An evaluation that collects a gibibyte, although a batch is tiny.
LARGE = {**METRICS, "preprocess_logits_for_metrics": lambda logits, _: logits.new_zeros(len(logits), 2**12)}


def run(folder: Path, budget: str, **changes: Any) -> tuple[Any, list[str]]:
    changes = {"eval_strategy": "epoch", "num_train_epochs": 1, "memory_opt_budget": budget, **BUDGET, **changes}
    trainer = make(folder, "small", **changes)
    # The evaluation itself is not tested.
    trainer.evaluate = lambda *_, **__: {}
    with log_lines() as lines:
        trainer.train()
    shown = ("evaluation", "other than training", "other phases")
    return trainer, [line for line in lines if any(part in line for part in shown)]


def available(monkeypatch: pytest.MonkeyPatch, total: int) -> None:
    monkeypatch.setattr(user_step, "capacity", lambda _: Capacity(total, total))


def test_an_evaluation_that_may_not_fit_is_a_warning_with_the_flag(tmp_path: Path) -> None:
    held = user_step.held_bytes(torch.device("cpu"))
    budget = f"{held // 2**20 + 256}MiB"
    _, (line,) = run(tmp_path, budget, eval_dataset=MANY, **LARGE)
    assert line.startswith(f"--memory_opt_budget {budget}: evaluation needs ")
    # Collected tensors stay on a CPU.
    assert line.endswith(": preprocess_logits_for_metrics")
    assert not run(tmp_path, budget, eval_dataset=MANY, **METRICS)[1]


@in_turn
def test_auto_says_what_others_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_step, "capacity", lambda _: Capacity(2**36, 2**35, 2**34))
    trainer = make(tmp_path, "small", memory_opt_budget="auto", **BUDGET)
    with log_lines() as lines:
        trainer.train()
    assert "--memory_opt_budget auto: 32.00 GiB of 64.00 GiB, of which 16.00 GiB are used elsewhere" in lines


@pytest.mark.parametrize("changes", [{"eval_strategy": "no"}, {"eval_dataset": None, "eval_strategy": "no"}])
def test_a_run_without_evaluation_has_no_line(changes: dict[str, Any], tmp_path: Path) -> None:
    assert not run(tmp_path, "100GiB", **changes)[1]


def test_what_certainly_does_not_fit_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch, user_step.held_bytes(torch.device("cpu")) + 2**28)
    with pytest.raises(MemOptError, match="^evaluation needs .*: preprocess_logits_for_metrics$"):
        run(tmp_path, "100GiB", eval_dataset=MANY, **LARGE)


def reads_logits(logits: torch.Tensor, _: Any) -> torch.Tensor:
    return logits if (logits > 0).any() else -logits


@in_turn
def test_an_evaluation_that_reads_values_is_not_predicted(tmp_path: Path) -> None:
    trainer, (line,) = run(tmp_path, "100GiB", preprocess_logits_for_metrics=reads_logits, **METRICS)
    assert line.startswith("phases other than training are not predicted: the value of a tensor is read")
    assert trainer.state.global_step == 1


@in_turn
def test_a_check_that_fails_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(fake_run, "holders_of", broken)
    trainer, (line,) = run(tmp_path, "100GiB")
    assert line.startswith("the memory check of other phases is left out (KeyError: 'broken')")
    assert trainer.state.global_step == 1


@in_turn
def test_what_an_evaluation_keeps_is_forgotten(tmp_path: Path) -> None:
    """State that an evaluation keeps is restored, as TRL's Trainers keep in queues and lists in dictionaries."""
    trainer = make(tmp_path, "small", **BUDGET)
    trainer.kept = {"eval": {"loss": [1.0]}, "texts": deque([1], maxlen=2)}
    seen, random = trainer.state.num_input_tokens_seen, torch.get_rng_state()
    with left_as_it_is(trainer):
        trainer.kept["eval"]["loss"].append(2.0)
        trainer.kept["eval"]["entropy"] = [3.0]
        trainer.kept["texts"].extend([4, 5])
        trainer.state.num_input_tokens_seen += 1
        torch.rand(1)
        trainer.model.eval()
    assert trainer.kept == {"eval": {"loss": [1.0]}, "texts": deque([1], maxlen=2)}
    assert trainer.state.num_input_tokens_seen == seen
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in trainer.model.modules())


@in_turn
def test_what_goes_to_the_host_has_to_fit_there() -> None:
    phases = [RunPhase("evaluation", 2**30, 2**33), RunPhase("save", 2**30, 2**31), RunPhase("resume", 2**30, 2**33)]
    evaluation, resume = host_suggestions(phases, 2**32)
    assert evaluation == (
        "evaluation needs 8.00 GiB on the host, where 4.00 GiB are free: preprocess_logits_for_metrics or "
        "--prediction_loss_only"
    )
    assert resume.startswith("resume needs 8.00 GiB on the host")


def test_no_other_process_is_asked_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.MULTI_CPU)
    tensor = torch.ones(2)
    with compat_dry_run.alone():
        assert gather(tensor) is tensor


def test_it_changes_nothing_of_the_run_and_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("small")
    spent: list[float] = []
    check = fake_run.PhaseCheckCallback._check

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        found = check(*args)
        spent.append(time.process_time() - begin)
        return found

    monkeypatch.setattr(fake_run.PhaseCheckCallback, "_check", timed)
    checked, _ = run(tmp_path, "100GiB", model=copy.deepcopy(model), **METRICS)
    monkeypatch.setattr(fake_run.PhaseCheckCallback, "_check", lambda *_: [])
    unchecked, _ = run(tmp_path, "100GiB", model=model, **METRICS)
    assert distance(weights(checked.model), weights(unchecked.model)) == 0
    assert vars(checked).keys() == vars(unchecked).keys()
    assert len(spent) == 1
    assert spent[0] < 2
