"""MemOptTrainer and attach train the same weights as a plain Trainer, with any arguments."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import Trainer, TrainingArguments

from optimum_memopt import MemOptError, MemOptTrainer, attach, optimize, run_summary
from optimum_memopt.engines.shared.in_place import engine_of
from tests.model_zoo import ZOO
from tests.trainer_runs import CLOSE, build, collate, distance, log_lines, make, tables, weights


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory):
    """Returns a function for the final weights of a plain Trainer; each setup runs once."""
    known = {}

    def final(name, **changes):
        key = (name, repr(sorted(changes.items())))
        if key not in known:
            trainer = make(tmp_path_factory.mktemp("plain"), name, plain=True, **changes)
            before = weights(trainer.model)
            trainer.train()
            known[key] = weights(trainer.model)
            assert distance(known[key], before) > 100 * CLOSE, "the reference has hardly been trained"
        return known[key]

    return final


def engine_model(trainer):
    """Returns the model, and checks that the engine has trained it and is detached."""
    assert trainer.memopt.table.plans, "the engine has not trained this model"
    assert engine_of(trainer.model) is None and "forward" not in vars(trainer.model)
    return trainer.model


def test_label_smoothing_of_an_encoder_decoder(tmp_path):
    """Label smoothing trains an encoder-decoder: Trainer keeps the labels, so the collator adds decoder inputs."""

    def with_decoder_inputs(examples):
        batch = collate(examples)
        return {**batch, "decoder_input_ids": plain.model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    changes = {"label_smoothing_factor": 0.2, "data_collator": with_decoder_inputs}
    plain, ours = (make(tmp_path, "t5", plain=True, **changes), make(tmp_path, "t5", memory_opt_level=1, **changes))
    plain.train()
    ours.train()
    assert distance(weights(engine_model(ours)), weights(plain.model)) < CLOSE


def test_num_items_in_batch_reaches_the_model(tmp_path, plain_weights):
    """num_items_in_batch reaches the model; micro-batches have unequal token counts, so a mean of means is wrong."""
    seen = []

    class Spy(MemOptTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append(num_items_in_batch)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    changes = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 3}
    trainer = make(tmp_path, "gpt2", trainer=Spy, **changes)
    assert trainer.model_accepts_loss_kwargs
    with log_lines() as lines:
        trainer.train()
    assert len(set(map(int, seen))) == 3, "every step should count other tokens"
    assert len(tables(lines)) == 1, "one graph serves every count"
    assert distance(weights(trainer.model), plain_weights("gpt2", **changes)) < CLOSE


def test_a_detached_trainer_attaches_again_and_frees_its_model(tmp_path, plain_weights, engine):
    trainer = make(tmp_path, "small", memory_opt_engine=engine)
    trainer.train()
    trainer.memopt.detach()
    assert engine_of(trainer.model) is None
    assert "forward" not in vars(trainer.model)
    torch.save(trainer.model, tmp_path / "whole.pt")
    assert distance(weights(trainer.model), plain_weights("small")) < CLOSE
    trainer.train()
    alive = weakref.ref(engine_model(trainer))
    del trainer
    gc.collect()
    assert alive() is None, "something global holds it: in a notebook the next model would find the memory taken"


# Other ways to use an engine.


def test_attach_to_a_stock_trainer(tmp_path, plain_weights, engine):
    trainer = make(tmp_path, "gpt2", plain=True)
    config = "FastGelu+Reshape+:1:-1"
    attachment = attach(trainer, memory_opt_engine=engine, memory_opt_config=config)
    assert type(trainer) is Trainer and type(trainer.args) is TrainingArguments
    assert attachment is trainer.memopt and attachment.table is None
    with pytest.raises(MemOptError, match="this Trainer already has an engine"):
        attach(trainer, memory_opt_level=1)
    trainer.train()
    engine_model(trainer)
    assert [plan.config for plan in attachment.table.enabled if plan.requested_count] == [config]
    assert distance(weights(trainer.model), plain_weights("gpt2")) < CLOSE
    assert attachment.measured_peak_mib > 100
    assert f"{config} (1 of 1)" in run_summary(trainer)


def test_summary_of_a_run_that_logs_its_speed_in_each_step(tmp_path):
    trainer = make(tmp_path, "gpt2", include_num_input_tokens_seen="all", logging_steps=1, memory_opt_engine="compile")
    trainer.train()
    assert "samples/s" in run_summary(trainer)


class Overrides:
    """Overrides the usual methods of a subclass, with an effect on the weights."""

    def __init__(self, *args, **kwargs):
        self.calls = {"create_optimizer": 0, "compute_loss": 0, "training_step": 0}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        self.calls["create_optimizer"] += 1
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls["compute_loss"] += 1
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 2.0, 3.0]))
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        self.calls["training_step"] += 1
        return super().training_step(*args, **kwargs)


def test_a_subclass_keeps_its_overrides(tmp_path):
    name = "roberta-classification"
    ours = make(tmp_path, name, trainer=type("Ours", (Overrides, MemOptTrainer), {}), memory_opt_level=1)
    plain = make(tmp_path, name, plain=True, trainer=type("Plain", (Overrides, Trainer), {}))
    ours.train()
    plain.train()
    engine_model(ours)
    assert ours.calls == plain.calls == {"create_optimizer": 1, "compute_loss": 5, "training_step": 5}
    assert distance(weights(ours.model), weights(plain.model)) < CLOSE


def loop(model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(**ZOO["gpt2"].batch(2 + step, 6 + step, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_optimize_in_a_loop_of_ones_own(engine):
    expected = loop(build("gpt2"))
    model = build("gpt2")
    name, engine = engine, optimize(model, memory_opt_engine=engine, memory_opt_level=1)
    assert engine.plans() is None
    with pytest.raises(MemOptError, match=f"already has the {name} engine"):
        optimize(model)
    assert distance(loop(model), expected) < CLOSE
    assert len(engine.plans().enabled) > 2
    engine.detach()
    assert engine_of(model) is None and "forward" not in vars(model)
    engine.detach()
    again = build("gpt2")
    again.load_state_dict(model.state_dict())
    assert distance(loop(model), loop(again)) == 0, "after detach the model trains by its own forward"


# The model during and after training.


def test_the_trained_model_generates_and_copies(tmp_path, engine):
    trainer = make(tmp_path, "gpt2", memory_opt_engine=engine, memory_opt_level=1)
    trainer.train()
    plain = build("gpt2").eval()
    plain.load_state_dict(trainer.model.state_dict())
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    copied = copy.deepcopy(trainer.model)
    for model in (trainer.model.eval(), copied.eval()):
        asked = {**prompt, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
        assert model.generate(**asked).tolist() == plain.generate(**asked).tolist()
    assert engine_of(copied) is None
    assert trainer.model.train()(**ZOO["gpt2"].batch()).past_key_values is None, "nobody reads it in training"
    # The copy trains independently with its own forward, and does not affect the original.
    before = weights(trainer.model)
    copied.train()(**ZOO["gpt2"].batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert distance(weights(trainer.model), before) == 0
