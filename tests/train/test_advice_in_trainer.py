"""`--memory_opt_batch auto` in a Trainer on the small model, and when it is refused."""

import copy

import pytest
import torch
from transformers import TrainerCallback

from optimum_memopt import MemOptError
from optimum_memopt.report.page import of_training
from optimum_memopt.training import batches
from tests.rotation import in_turn
from tests.trainer_runs import build, distance, log_lines, make, rows, weights

AUTO = {"memory_opt_engine": "compile", "memory_opt_batch": "auto", "memory_opt_loss": "plain"}
FREE = {**AUTO, "memory_opt_budget": "auto"}


class Seen(TrainerCallback):
    """Records the rows of the model's batches, and counts the steps."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.steps = 0

    def on_train_begin(self, args, state, control, model, **kwargs):
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.batches.append(len(kwargs["input_ids"]))

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        self.during = args.per_device_train_batch_size, args.gradient_accumulation_steps


def test_the_rows_of_an_optimizer_step_stay(tmp_path):
    seen = Seen()
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_steps": 2}
    model = build("small")
    plain = make(tmp_path, "small", plain=True, model=copy.deepcopy(model), train_dataset=rows("small", 48), **sizes)
    plain.train()
    trainer = make(tmp_path, "small", model=model, train_dataset=rows("small", 48), callbacks=[seen], **FREE, **sizes)
    with log_lines() as lines:
        trainer.train()
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (3, 4)
    size, accumulation = seen.during
    assert size * accumulation == 12 and seen.steps == 2
    assert seen.batches[:2] == [size, size] and len(seen.batches) == 2 * accumulation
    (line,) = (line for line in lines if "memory_opt_batch" in line)
    assert line.startswith(f"--memory_opt_batch auto: micro-batches of {size} rows, {accumulation} per optimizer")
    assert distance(weights(trainer.model), weights(plain.model)) < 1e-5


@pytest.mark.parametrize(("smoothing", "loss"), [(0.1, "auto"), (0.1, "plain"), (0.0, "auto")])
def test_a_smoothed_loss_is_chunked_unless_it_is_plain(tmp_path, smoothing, loss):
    options = {**FREE, "memory_opt_loss": loss, "label_smoothing_factor": smoothing}
    trainer = make(tmp_path, "gpt2", per_device_train_batch_size=2, **options)
    predictor = batches._predictor(trainer, trainer.args, "compile")
    assert predictor.plans[0].chunks_loss == (loss == "auto")


def test_the_page_shows_the_chosen_micro_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "_agreed", lambda *_: 3)
    sizes = {"per_device_train_batch_size": 12, "max_steps": 2}
    options = {**FREE, "memory_opt_report": str(tmp_path / "page.html")}
    trainer = make(tmp_path, "small", train_dataset=rows("small", 48), **options, **sizes)
    trainer.train()
    data = of_training(trainer, trainer.memopt.engine, "")
    assert dict(data.facts)["micro-batch"] == "3 rows, 4 accumulated"
    assert data.timeline.peak == round(trainer.memopt.plan_stats.predicted_peak_mib * 2**20)
    assert "3 rows, 4 accumulated" in (tmp_path / "page.html").read_text()


def test_auto_find_batch_size_starts_from_the_prediction(tmp_path):
    seen = Seen()
    sizes = {"auto_find_batch_size": True, "per_device_train_batch_size": 12, "max_steps": 1}
    trainer = make(tmp_path, "small", train_dataset=rows("small", 48), callbacks=[seen], **FREE, **sizes)
    trainer.train()
    assert seen.batches == [seen.during[0]] * seen.during[1]


@in_turn
def test_what_cannot_be_chosen_for(tmp_path):
    with pytest.raises(MemOptError, match="memory_opt_batch auto needs training data that can be read before"):
        make(tmp_path, "small", train_dataset=Drawn(), **FREE)
    trainer = make(tmp_path, "small", memory_opt_budget="64MiB", **AUTO)
    with pytest.raises(MemOptError, match="memory_opt_batch auto: a step with one row needs at least"):
        trainer.train()


class Drawn(torch.utils.data.Dataset):
    """A dataset whose rows may be drawn at random."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index):
        return rows("small", 8)[index]
