"""An out-of-memory error in any Trainer is explained, written to files, and raised unchanged."""

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor
from transformers import Trainer

from optimum_memopt import MemoryReportCallback
from optimum_memopt.engines.api.explanations import OPTIMIZER_STEP
from optimum_memopt.engines.api.predictions import OPTIMIZER, PARAMETERS, SAVED
from tests.limited_memory import LimitedTensors, RunsOut
from tests.rotation import in_turn
from tests.trainer_runs import log_lines, make


class UnderLimit(Trainer):
    """A stock Trainer that limits the bytes of its steps' tensors, from the second step on."""

    limit = 2**62

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with LimitedTensors(self.limit if self.state.global_step else 2**62) as self.memory:
            return super().training_step(*args, **kwargs)


def peak_of_a_step(folder: Any, **changes: Any) -> int:
    trainer = make(folder, "small", plain=True, trainer=UnderLimit, max_steps=1, **changes)
    trainer.train()
    return trainer.memory.peak


@pytest.fixture(scope="module")
def ran_out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    peak = peak_of_a_step(folder)
    callback = MemoryReportCallback()
    trainer = make(folder, "small", plain=True, trainer=UnderLimit, callbacks=[callback])
    trainer.limit = int(0.7 * peak)
    with log_lines() as lines, pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    return trainer, callback, lines, caught.value, folder


def test_the_error_is_raised_as_it_was(ran_out):
    _, _, _, error, _ = ran_out
    assert str(error).startswith("out of memory. Tried to allocate")
    assert error.__cause__ is None and error.__context__ is None


def test_it_is_explained_on_one_screen_and_in_files(ran_out):
    trainer, callback, lines, _, folder = ran_out
    report = callback.report
    assert report.step == 1 and report.rows == 4 and report.engine == "plain PyTorch"
    assert report.requested == trainer.memory.requested
    assert report.sizes["input_ids"].startswith("4 x ")
    assert {part.category: part.bytes for part in report.parts}[PARAMETERS] == sum(
        parameter.nbytes for parameter in trainer.model.parameters()
    )
    assert next(part for part in report.parts if part.category == SAVED).tensors
    assert report.accounted >= 0.95
    assert report.to_text() in lines
    assert json.loads((folder / "memory_report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    assert not report.remarks


def test_the_model_and_its_run_are_left_as_they_were(ran_out):
    trainer = ran_out[0]
    trainer.limit = 2**62
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    assert not trainer.model._forward_pre_hooks
    assert type(copy.deepcopy(trainer.model)) is type(trainer.model)


def reported(tmp_path, hook) -> MemoryReportCallback:
    """Run out of memory with a hook on the model's head, and return the callback with its report."""
    callback = MemoryReportCallback()
    trainer = make(tmp_path, "small", plain=True, trainer=UnderLimit, callbacks=[callback])
    trainer.limit = 1000
    trainer.model.head.register_forward_pre_hook(hook)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.train()
    return callback


@in_turn
def test_a_forward_that_cannot_be_traced_is_explained_by_what_is_known(tmp_path):
    def reads_values(module: torch.nn.Module, args: Any) -> None:
        assert args[0].abs().max().item() >= 0

    callback = reported(tmp_path, reads_values)
    assert "could not be traced" in callback.report.remarks[0]
    assert callback.report.remarks[1].startswith("try half of --per_device_train_batch_size")
    assert callback.report.moment.phase == "forward"
    assert (tmp_path / "memory_report.md").exists()


@in_turn
def test_too_little_memory_to_trace_it(tmp_path):
    def runs_out(module: torch.nn.Module, args: Any) -> None:
        if isinstance(args[0], FakeTensor):
            raise MemoryError

    callback = reported(tmp_path, torch.compiler.disable(runs_out))
    assert "MemoryError" in callback.report.remarks[0]
    assert callback.report.remarks[1].startswith("tracing needs a few hundred MiB")
    assert "half of --per_device_train_batch_size" in callback.report.remarks[2]


@in_turn
def test_micro_batches_that_are_tried_in_turn_are_explained_once(tmp_path):
    """Micro-batches that are tried in turn are explained once, since a report takes seconds."""
    steps = {1: "forward", 2: "backward", 3: "forward"}
    changes = {"auto_find_batch_size": True, "callbacks": [MemoryReportCallback()]}
    trainer = make(tmp_path, "small", trainer=partial(RunsOut, fails=steps), memory_opt_engine="compile", **changes)
    with log_lines() as lines:
        trainer.train()
    assert len(trainer.raised) == 3 and trainer.state.global_step == 5
    assert sum(line.startswith("memory ran out in step") for line in lines) == 1
    again = [line for line in lines if "also ran out" in line]
    assert again == [f"memory also ran out with a micro-batch of {rows} rows; explained for 4" for rows in (3, 2)]
    # The next run is explained anew.
    trainer.fails = {trainer.forwards + 1: "forward"}
    with log_lines() as lines, pytest.raises(RuntimeError, match="reached zero"):
        trainer.train()
    assert len(trainer.raised) == 4
    assert sum(line.startswith("memory ran out in step") for line in lines) == 1


def test_a_report_that_cannot_be_written_is_a_line(tmp_path, monkeypatch):
    callback = MemoryReportCallback()
    trainer = make(tmp_path, "small", plain=True, trainer=UnderLimit, callbacks=[callback])
    trainer.limit = 1000
    (tmp_path / "memory_report.json").mkdir()
    with log_lines() as lines, pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert any(line.startswith("could not write the report (IsADirectoryError") for line in lines)


class Wide(torch.nn.Module):
    """A model whose optimizer states are larger than the variation of the process's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16)))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(input_ids[:, :1].float().expand(-1, 1024)).square().mean()}


class Failing(torch.optim.AdamW):
    """An optimizer that runs out of memory after creating the first of its two states."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.ones_like(parameter)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@in_turn
def test_the_optimizers_step(tmp_path):
    callback = MemoryReportCallback()
    trainer = make(tmp_path, "small", plain=True, optimizers=(None, None), callbacks=[callback])
    trainer.optimizer = Failing(trainer.model.parameters(), lr=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert callback.report.moment.phase == OPTIMIZER_STEP
    assert not callback.report.suggestions and "optimizer with smaller" in callback.report.remarks[0]
    held = {part.category: part.bytes for part in callback.report.parts}
    assert held["gradients"] == held[PARAMETERS] == held[OPTIMIZER]


@in_turn
def test_another_optimizer_would_have_fit(tmp_path):
    callback, model = MemoryReportCallback(), Wide()
    trainer = make(tmp_path, "small", plain=True, model=model, optimizers=(None, None), callbacks=[callback])
    trainer.optimizer = Failing(model.parameters(), lr=0.1)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    (suggestion,) = callback.report.suggestions
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert suggestion.flags == "--optim adafactor" and "trains differently" in suggestion.what
    # Excludes the state that existed, and includes Adafactor's temporaries of two layers.
    assert callback.report.held - weights < suggestion.peak < callback.report.held - 0.7 * weights
    assert callback.report.remarks[1:] == ()


def test_another_error_is_left_alone(tmp_path):
    callback = MemoryReportCallback()
    trainer = make(tmp_path, "small", plain=True, callbacks=[callback])
    trainer.model.head = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.train()
    assert callback.report is None and not (tmp_path / "memory_report.json").exists()
