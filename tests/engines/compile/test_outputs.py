"""Where the loss alone is gone back from, the logits have no gradient, and take no memory for one."""

import copy

import pytest
import torch
from gradients import Batch, assert_bitwise_same_step
from model_zoo import ZOO

from optimum_memopt import MemOptTrainer
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.compile.engine import CompileEngine
from tests.trainer_runs import distance, make, weights

VOCABULARY = 999


def attached(model: torch.nn.Module, loss_alone: bool) -> CompileEngine:
    engine = CompileEngine(Selection(level=1), compiler="aot_eager")
    engine.loss_alone = loss_alone
    engine.attach(model)
    return engine


@pytest.mark.parametrize(("name", "return_dict"), [("roberta-mlm", True), ("roberta-mlm", False), ("gpt2", True)])
def test_the_same_step_in_less_memory(name, return_dict):
    case = ZOO[name]
    model = case.build("eager")
    model.resize_token_embeddings(VOCABULARY)
    model.config.return_dict = return_dict
    # With caches PyTorch adds some gradients in another order.
    model.config.use_cache = False
    plain, all_outputs = copy.deepcopy(model), copy.deepcopy(model)
    with_all, alone = attached(all_outputs, False), attached(model, True)
    batch: Batch = case.batch(4, 12)

    outputs = model(**batch)
    if return_dict:
        assert type(outputs) is type(plain(**batch))
    loss, logits = outputs[:2]
    assert loss.requires_grad and not logits.requires_grad
    assert all_outputs(**batch)[1].requires_grad
    peaks = [engine.forecast.footprint().activations for engine in (with_all, alone)]
    assert peaks[0] - peaks[1] >= 4 * 12 * VOCABULARY * 4, "a gradient of the logits' size less"
    if return_dict:
        assert_bitwise_same_step(model, plain, batch, case.batch(3, 7, seed=1))


class FromLogits(MemOptTrainer):
    """A Trainer that makes the loss itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"]) * 2
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("trainer", "changes", "alone"),
    [
        (MemOptTrainer, {}, True),
        (MemOptTrainer, {"label_smoothing_factor": 0.1}, False),
        (MemOptTrainer, {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.square().sum()}, False),
        (FromLogits, {}, False),
    ],
    ids=["stock", "label-smoothing", "compute_loss_func", "compute_loss"],
)
def test_a_trainer_knows_what_its_loss_is_made_of(tmp_path, trainer, changes, alone):
    name = "roberta-classification"
    ours = make(tmp_path, name, trainer=trainer, memory_opt_engine="compile", max_steps=2, **changes)
    ours.train()
    assert ours.memopt.engine.loss_alone is alone
    stock = make(tmp_path, name, trainer=trainer, memory_opt_engine="compile", max_steps=2, **changes)
    stock.memopt.engine.attach = lambda model: None
    stock.train()
    assert distance(weights(ours.model), weights(stock.model)) < 1e-6
    assert ours.memopt.table.plans and stock.memopt.table is None
