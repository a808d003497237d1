"""The chunked loss in a Trainer: what it trains, logs and hands to others is what a stock Trainer would."""

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.rotation import nightly
from tests.train.test_chunked_loss import ROW, VOCABULARY, Causal
from tests.trainer_runs import collate, distance, log_lines, make, weights

TINY = "tiny"
COMPILE = {"memory_opt_engine": "compile"}
NAMES = nightly([TINY, "gpt2", "bart"], but=[TINY])


class Rows(list):
    def __init__(self, count=16, length=12):
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
            labels = ids.masked_fill(torch.rand(length, generator=generator) > 0.6, -100)
            self.append({"input_ids": ids, "labels": labels})


def with_decoder_inputs(rows):
    """As `DataCollatorForSeq2Seq`: a Trainer that smooths labels does not give them to the model."""
    batch = collate(rows)
    return {**batch, "decoder_input_ids": batch["labels"].clamp(min=0).roll(1, dims=1)}


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def made(folder, name, plain=False, **changes):
    if name == TINY:
        own = {"model": Causal(), "train_dataset": Rows(), "eval_dataset": Rows(4), "data_collator": None}
        changes = own | changes
    if name == "bart" and "label_smoothing_factor" in changes:
        changes = {**changes, "data_collator": with_decoder_inputs}
    return make(
        folder, "gpt2" if name == TINY else name, plain=plain, logging_steps=1, **({} if plain else COMPILE), **changes
    )


SETTINGS = {
    "default": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "label smoothing, accumulation": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_trains_and_logs_as_a_stock_trainer(tmp_path, name, setting):
    changes = SETTINGS[setting]
    stock, ours = (made(tmp_path / str(plain), name, plain, **changes) for plain in (True, False))
    tolerance = 2e-2 if setting == "bf16" else 2e-4
    assert losses(ours) == pytest.approx(losses(stock), rel=tolerance)
    assert distance(weights(ours.model), weights(stock.model)) < tolerance
    (row,) = (row for row in ours.memopt.table.plans if row.config == ROW)
    assert row.applied_count == 1
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=tolerance)


class ReadsLogits(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-3 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


def own_loss(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


READERS = {
    "ReadsLogits, which asks compute_loss for the outputs,": {"trainer": ReadsLogits},
    "compute_loss_func": {"compute_loss_func": own_loss},
}


@pytest.mark.parametrize("reader", READERS)
def test_a_trainer_that_reads_the_logits_is_told(tmp_path, reader):
    changes = READERS[reader]
    stock = made(tmp_path / "stock", TINY, plain=True, **changes)
    expected = losses(stock)
    attached = made(tmp_path / "ours", TINY, plain=True, **changes)
    from optimum_memopt import attach

    with log_lines() as lines:
        attach(attached, memory_opt_compiler="aot_eager", **COMPILE)
        assert losses(attached) == pytest.approx(expected, rel=1e-6)
    # With a loss function of its own the model gets no labels, so it has no loss.
    told = [line for line in lines if "is not chunked" in line]
    assert told == ([] if "func" in reader else [f"the loss of Causal is not chunked: {reader} may read the logits"])


class HooksLater(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, model=None, **others):
        if state.global_step == 2:
            model.register_forward_hook(lambda module, inputs, outputs: self.seen.append(outputs.logits.shape))


def test_a_hook_that_comes_later_sees_the_logits(tmp_path):
    hooks = HooksLater()
    trainer = made(tmp_path, TINY, callbacks=[hooks], max_steps=4)
    assert len(losses(trainer)) == 4
    assert hooks.seen == [(4, 12, VOCABULARY)] * 2
