"""A step that runs out of memory is run again under a smaller plan, with the same result as with enough memory."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from optimum_memopt import MemOptError, MemOptTrainingArguments, attach
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture import variants
from optimum_memopt.engines.compile.memory import footprint
from optimum_memopt.oom import guard
from tests.limited_memory import RunsOut
from tests.rotation import in_turn, nightly
from tests.trainer_runs import CASES, arguments, build, collate, log_lines, make, weights

PLAIN = {"memory_opt_engine": "compile", "memory_opt_loss": "plain"}
REPLAN = {**PLAIN, "memory_opt_on_oom": "replan"}


@pytest.fixture(autouse=True)
def steady_process(monkeypatch):
    """Ignore the memory of the process, which is a thousand times that of such a small model."""
    for module in (footprint, variants):
        monkeypatch.setattr(module, "held_bytes", lambda device: 0)
    monkeypatch.setattr(footprint, "_GROWTH", 0)


def data(name: str, length: int = 40) -> list[dict[str, torch.Tensor]]:
    rows = [CASES[name].batch(1, length, seed=seed) for seed in range(24)]
    return [{key: value[0] for key, value in row.items()} for row in rows]


def a_tenth_less(trainer: Any) -> int:
    """Returns nine tenths of the predicted peak under the current plan."""
    return int(0.9 * trainer.memopt.engine.predicted_peak_mib(trainer.optimizer) * 2**20)


def built(name: str, changes: dict[str, Any]) -> torch.nn.Module:
    model = build(name, **changes)
    if name == "small":
        model.layer[0].act = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Dropout(0.1))
    return model


def trained(folder: Path, name: str, changes: dict[str, Any], fails: dict[int, str], **more: Any) -> Any:
    torch.manual_seed(0)
    trainer = RunsOut(
        model=built(name, changes),
        args=arguments(MemOptTrainingArguments, folder, **{**REPLAN, "per_device_train_batch_size": 8, **more}),
        train_dataset=data(name),
        data_collator=collate,
        fails=fails,
        held=a_tenth_less,
    )
    trainer.train()
    return trainer


DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
ROBERTA = ("roberta-classification", DROPOUT, "forward")


@pytest.mark.parametrize(
    ("name", "changes", "where"),
    nightly(
        [("small", {}, "backward"), ("llama", {}, "forward"), ("gpt2", {"resid_pdrop": 0.1}, "backward"), ROBERTA],
        but=["small"],
    ),
)
def test_weights_are_bitwise_those_of_a_run_with_enough_memory(tmp_path, name, changes, where):
    enough = trained(tmp_path / "enough", name, changes, {})
    with log_lines() as lines:
        replanned = trained(tmp_path / "short", name, changes, {2: where})
    assert enough.forwards == 5 and replanned.forwards == 6
    assert (
        all(map(torch.equal, enough.losses["train"], replanned.losses["train"]))
        and len(replanned.losses["train"]) == 5
    )
    assert not enough.memopt.table.enabled
    assert replanned.memopt.table.enabled
    said = [line for line in lines if "rerunning it" in line]
    assert [re.match(rf"step (\d) ran out of memory in its {where}", line)[1] for line in said] == ["2"]
    assert said[0].endswith("(1 of 3)")
    expected, found = weights(enough.model), weights(replanned.model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    losses = [[entry["loss"] for entry in one.state.log_history if "loss" in entry] for one in (enough, replanned)]
    assert losses[0] == losses[1]


def run_small(folder: Path, fails: dict[int, str], **more: Any) -> tuple[Any, list[str], BaseException | None]:
    """Train the smallest model; returns the Trainer, its log lines, and the error that ended the run."""
    trainer = make(folder, "small", trainer=partial(Small, fails=fails), **{**REPLAN, **more})
    with log_lines() as lines:
        try:
            trainer.train()
        except RuntimeError as error:
            return trainer, lines, error
    return trainer, lines, None


class Small(RunsOut):
    """A Trainer whose plan has nothing to recompute, so that any large budget works."""

    def __init__(self, *args: Any, fails: dict[int, str], **kwargs: Any) -> None:
        super().__init__(*args, fails=fails, held=lambda trainer: 2**30, **kwargs)


@in_turn
def test_at_most_three_times_and_then_the_first_error(tmp_path):
    trainer, lines, error = run_small(tmp_path, dict.fromkeys((2, 3, 4, 5), "forward"))
    assert error is trainer.raised[0]
    assert trainer.forwards == 5 and trainer.state.global_step == 1
    assert sum("rerunning it" in line for line in lines) == 3
    assert any("is not rerun: it was already replanned 3 times" in line for line in lines)
    assert (tmp_path / "memory_report.json").exists()


@pytest.mark.nightly
def test_each_plan_is_for_less_than_the_last_budget(tmp_path):
    """Each new plan has a smaller budget than the last one, since each step held more than was planned."""
    _, lines, error = run_small(tmp_path, {2: "forward", 3: "backward"}, memory_opt_budget="512MiB")
    assert error is None
    budgets = [line.partition("planning for ")[2].split(" and ")[0] for line in lines if "rerunning it" in line]
    assert budgets == ["496.6 MiB", "481.7 MiB"]


@pytest.mark.nightly
def test_each_run_has_its_three_times(tmp_path):
    trainer, _, error = run_small(tmp_path, {2: "forward"}, max_steps=2)
    assert error is None and trainer.memopt.engine.selection.budget is not None
    trainer.fails = {4: "forward", 5: "backward", 6: "forward"}
    with log_lines() as lines:
        trainer.train()
    assert [line[-8:] for line in lines if "rerunning it" in line] == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]


def test_a_step_that_another_rank_ends_is_not_rerun(tmp_path, monkeypatch):
    """The other rank would not take part in the next all-gather."""
    trainer = RunsOut(
        model=build("small"),
        args=arguments(MemOptTrainingArguments, tmp_path, **REPLAN),
        train_dataset=data("small"),
        data_collator=collate,
        fails={2: "forward"},
        held=lambda trainer: 2**30,
    )
    monkeypatch.setattr(guard, "_outcomes", lambda own, device: [own, 2 if own else 0])
    trainer.compute_loss = guard.agreeing(trainer, trainer.compute_loss)
    with log_lines() as lines, pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert trainer.forwards == 2 and not any("rerunning it" in line for line in lines)
    assert "the step is not rerun: another rank failed with another error, which ends the run" in lines


def test_the_next_run_has_the_users_plan_again(tmp_path):
    trainer = trained(tmp_path, "small", {}, {2: "backward"}, memory_opt_level=1, memory_opt_strict=False)
    engine = trainer.memopt.engine
    assert engine.selection.budget is not None and not engine.selection.strict
    trainer.fails = {}
    with log_lines() as lines:
        trainer.train()
    assert engine.selection == Selection(level=1, strict=False)
    assert not any("budget" in line for line in lines)


def test_a_plan_for_less_may_compress_if_the_users_may(tmp_path):
    compressing = {"memory_opt_budget": "1GiB", "memory_opt_compress": "fp8"}
    trainer = trained(tmp_path, "small", {}, {2: "backward"}, **compressing)
    assert trainer.memopt.engine.selection.compress == "fp8"


@in_turn
def test_gradients_of_earlier_micro_batches_stay(tmp_path):
    accumulating = {"gradient_accumulation_steps": 2, "max_steps": 2}
    enough, _, _ = run_small(tmp_path / "enough", {}, **accumulating)
    replanned, _, error = run_small(tmp_path / "short", {2: "backward", 4: "forward"}, **accumulating)
    assert error is None and replanned.forwards == enough.forwards + 2
    expected, found = weights(enough.model), weights(replanned.model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@in_turn
def test_gradients_that_were_added_to_cannot_be_taken_back(tmp_path):
    accumulating = {"gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = make(tmp_path, "small", trainer=partial(Small, fails={}), **REPLAN, **accumulating)
    parameters = list(trainer.model.parameters())
    added = []

    def run_out(gradient: torch.Tensor) -> None:
        added.append(gradient)
        if len(added) == len(parameters) + 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for parameter in parameters:
        parameter.register_hook(run_out)
    with log_lines() as lines, pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        trainer.train()
    assert any("had begun to add to the gradients of earlier micro-batches" in line for line in lines)


class WithLossModule(Small):
    """A loss with its own parameters and running statistics; memory runs out after they have gradients."""

    def __init__(self, *args: Any, holds: str, **kwargs: Any) -> None:
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
        self.loss_module = (module,).__getitem__
        if holds == "attribute":
            self.loss = module
        elif holds == "dictionary":
            self.loss = {"first data set": module}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        optimizer.add_param_group({"params": list(self.loss_module(0).parameters())})
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(**inputs).logits
        if self.count():
            logits.register_hook(lambda gradient: self._run_out())
        return self.loss_module(0)(logits).square().sum()


@in_turn
@pytest.mark.parametrize("holds", nightly(["attribute", "dictionary"], but=["attribute"]))
def test_a_loss_with_parameters_and_statistics_of_its_own(tmp_path, holds):
    def run(folder: str, fails: dict[int, str]) -> Any:
        torch.manual_seed(0)
        kind = partial(WithLossModule, fails=fails, holds=holds)
        trainer = make(tmp_path / folder, "small", trainer=kind, **REPLAN)
        trainer.train()
        return trainer

    enough, replanned = run("enough", {}), run("short", {2: "backward"})
    assert replanned.forwards == enough.forwards + 1
    for which in (lambda trainer: trainer.model, lambda trainer: trainer.loss_module(0)):
        expected, found = weights(which(enough)), weights(which(replanned))
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_loss_module_that_is_not_the_trainers_is_refused(tmp_path):
    trainer = make(tmp_path, "small", trainer=partial(WithLossModule, fails={}, holds="nowhere"), **REPLAN)
    with pytest.raises(MemOptError, match=r"optimizer trains 4 parameters .* trainer.head = head, or leave"):
        trainer.train()
    assert trainer.forwards == 0


@in_turn
def test_an_optimizer_that_steps_inside_the_backward_is_refused(tmp_path):
    trainer = make(tmp_path / "hooks", "small", trainer=partial(Small, fails={}), **REPLAN)
    next(trainer.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(MemOptError, match="replan with an optimizer that steps inside the backward .*; leave it out$"):
        trainer.train()
    assert trainer.forwards == 0
    trainer = make(tmp_path / "lomo", "small", trainer=partial(Small, fails={}), **REPLAN)
    # accelerate's `prepare` sets this.
    trainer.accelerator.has_lomo_optimizer = True
    with pytest.raises(MemOptError, match="replan with an optimizer that steps inside the backward"):
        trainer.train()


@in_turn
def test_parameters_that_have_changed_cannot_be_taken_back(tmp_path):
    trainer = make(tmp_path, "small", trainer=partial(Small, fails={2: "backward"}), **REPLAN)
    changed = next(trainer.model.parameters())

    def shrink(*args: Any) -> None:
        with torch.no_grad():
            changed.mul_(0.5)

    trainer.model.register_forward_pre_hook(torch.compiler.disable(shrink))
    with log_lines() as lines, pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert any(line.endswith("is not rerun: its backward had begun to change parameters") for line in lines)


@in_turn
def test_a_budget_that_nothing_fits_ends_in_the_first_error(tmp_path):
    too_little = partial(RunsOut, fails={2: "forward"}, held=lambda trainer: 4096)
    trainer = make(tmp_path, "small", trainer=too_little, **REPLAN)
    with log_lines() as lines, pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    assert caught.value is trainer.raised[0]
    assert any(line.startswith("no plan fits: --memory_opt_budget") for line in lines)


def test_another_error_is_left_alone(tmp_path):
    trainer = make(tmp_path, "small", trainer=partial(Small, fails={}), **REPLAN)
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def fail(*args: Any) -> None:
        raise error

    trainer.model.head.register_forward_pre_hook(torch.compiler.disable(fail))
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert caught.value is error


class Shortens(Trainer):
    """Steps that replace the rows of their batch, as in distillation; Trainer counts the new rows."""

    def training_step(self, model, inputs, *args, **kwargs):
        length = 3 + self.state.global_step
        inputs.update({name: inputs[name][:, :length] for name in ("input_ids", "attention_mask")})
        return super().training_step(model, inputs, *args, **kwargs)


@in_turn
@pytest.mark.parametrize("on_oom", ["explain", "replan"])
def test_a_batch_that_a_step_changes_stays_changed(tmp_path, on_oom):
    logs = []
    for attaches in (False, True):
        trainer = make(tmp_path, "small", plain=True, trainer=Shortens, max_steps=3)
        if attaches:
            options = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
            attach(trainer, memory_opt_level=1, memory_opt_on_oom=on_oom, **options)
        trainer.train()
        logs.append(trainer.state.log_history[-1]["total_flos"])
    assert logs[0] == logs[1]


class Strict(Small):
    """A Trainer that raises its own error in a step that is run again."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.forwards == 3:
            raise ValueError("this batch was here before") from KeyError("batch")
        return loss


@in_turn
def test_another_error_of_the_step_that_is_run_again_comes_out(tmp_path):
    trainer = make(tmp_path, "small", trainer=partial(Strict, fails={2: "forward"}), **REPLAN)
    with pytest.raises(ValueError, match="this batch was here before") as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__context__ is trainer.raised[0]


def test_what_cannot_plan_is_refused(tmp_path):
    with pytest.raises(MemOptError, match="--memory_opt_on_oom replan with the ort engine: it cannot plan"):
        arguments(MemOptTrainingArguments, tmp_path, memory_opt_engine="ort", memory_opt_on_oom="replan")
    with pytest.raises(MemOptError, match="--memory_opt_on_oom never: allowed: explain, replan"):
        arguments(MemOptTrainingArguments, tmp_path, memory_opt_on_oom="never")
