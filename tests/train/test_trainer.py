"""MemOptTrainer and attach beside the plain Trainer: the same weights, whatever the Trainer is told."""

import copy
import gc
import itertools
import weakref
from dataclasses import dataclass

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PredictionOutput

from optimum_memopt import MemOptError, MemOptTrainer, MemOptTrainingArguments, attach, optimize, run_summary
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.engines.shared.registry import engine_names
from tests.model_zoo import ZOO
from tests.rotation import nightly
from tests.trainer_runs import ROWS, arguments, build, collate, distance, log_lines, make, rows, tables, weights

MODELS = ("roberta-classification", "gpt2", "t5")
CONFIGS = {
    "roberta-classification": "Gelu+:1:-1",
    "gpt2": "FastGelu+Reshape+:1:-1",
    "t5": "SimplifiedLayerNormalization+:1:-1",
}
# What `test_matrix.py` has not seen of the compile engine, which takes seconds for each model and plan.
UNDER_PLANS = [
    *itertools.product(["ort"], MODELS, ["none", "config", 1, 2]),
    ("compile", "roberta-classification", "config"),
    ("compile", "gpt2", "none"),
    ("compile", "gpt2", 2),
    ("compile", "t5", 1),
]
# T5 under a level is trained below, and with the compile engine in `test_trainer_compile.py`; GPT-2 with it under a
# config and a level in the tests of `attach` and of evaluation.
FAST_PLANS = {
    ("ort", "roberta-classification", "config"),
    ("ort", "gpt2", "none"),
}
CLOSE = 1e-5


@pytest.fixture(params=engine_names())
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def plain_weights(tmp_path_factory):
    """Final weights of the plain Trainer, each set-up run once."""
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


@pytest.mark.parametrize("engine, name, plan", nightly(UNDER_PLANS, but=FAST_PLANS))
def test_the_same_weights_under_every_plan(tmp_path, plain_weights, engine, name, plan):
    config = CONFIGS[name]
    asked = {"config": {"memory_opt_config": config}, "none": {}}.get(plan, {"memory_opt_level": plan})
    trainer = make(tmp_path, name, memory_opt_engine=engine, **asked)
    trainer.train()
    assert trainer.model is engine_model(trainer)
    on = {one.config for one in trainer.memopt.table.enabled}
    if (engine, name) == ("compile", "gpt2"):
        assert "Loss+:1:-1" in on, "a language model's loss is computed in chunks whatever the plan"
        on.remove("Loss+:1:-1")
    assert {"none": not on, "config": on == {config}}.get(plan, len(on) > 2), on
    assert distance(weights(trainer.model), plain_weights(name)) < CLOSE


def engine_model(trainer):
    """The model, if it is this trainer's engine that trained it, and has given it back."""
    assert trainer.memopt.table.plans, "the engine has not trained this model"
    assert engine_of(trainer.model) is None and "forward" not in vars(trainer.model)
    return trainer.model


SETUPS = {
    "accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    # 18 rows in micro-batches of 4, two a step: a last micro-batch of 2, alone in its step.
    "short-last": {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2},
    "clipping": {"max_grad_norm": 0.01},
    "no-clipping": {"max_grad_norm": 0.0},
    "label-smoothing": {"label_smoothing_factor": 0.2},
    "weight-decay": {"weight_decay": 0.3},
    "warmup-cosine": {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "per-row": {"per_device_train_batch_size": 1, "max_steps": 8},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "no-token-average": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
}


# Those that change what a forward is given.
OTHER_FORWARDS = ["accumulation", "short-last", "label-smoothing", "per-row"]
ON_GPT2 = [*itertools.product(["ort"], ["gpt2"], SETUPS), *itertools.product(["compile"], ["gpt2"], OTHER_FORWARDS)]
# "short-last" accumulates, too, and "evaluation" has a test of its own below.
FAST_SETUPS = [
    *itertools.product(["ort"], ["gpt2"], ["short-last", "label-smoothing", "per-row", "clipping"]),
    ("compile", "gpt2", "short-last"),
]


@pytest.mark.parametrize(
    "engine, name, setup",
    nightly([*itertools.product(["ort"], ["roberta-classification"], SETUPS), *ON_GPT2], but=FAST_SETUPS),
)
def test_the_same_weights_in_every_set_up(tmp_path, plain_weights, engine, name, setup):
    trainer = make(tmp_path, name, memory_opt_engine=engine, memory_opt_level=1, **SETUPS[setup])
    trainer.train()
    engine_model(trainer)
    expected = plain_weights(name, **SETUPS[setup])
    assert distance(weights(trainer.model), expected) < CLOSE
    if setup not in ("evaluation", "no-token-average"):
        usual = {"max_steps": trainer.state.global_step} if trainer.args.max_steps != 5 else {}
        assert distance(expected, plain_weights(name, **usual)) > 100 * CLOSE, "this set-up changes nothing"


def test_label_smoothing_of_an_encoder_decoder(tmp_path):
    """The labels stay with the Trainer, so the model gets decoder inputs in their place, as from a collator for it."""

    def with_decoder_inputs(examples):
        batch = collate(examples)
        return {**batch, "decoder_input_ids": plain.model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    changes = {"label_smoothing_factor": 0.2, "data_collator": with_decoder_inputs}
    plain, ours = (
        make(tmp_path, "t5", plain=True, **changes),
        make(tmp_path, "t5", memory_opt_level=1, **changes),
    )
    plain.train()
    ours.train()
    assert distance(weights(engine_model(ours)), weights(plain.model)) < CLOSE


def test_num_items_in_batch_reaches_the_model(tmp_path, plain_weights):
    """Micro-batches of unequal token counts: a mean of means would be another gradient."""
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


@dataclass
class Evaluated:
    """A trained Trainer, its evaluations before, during and after training, and what it predicted."""

    trainer: Trainer
    losses: list[float]
    predicted: PredictionOutput


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The plain Trainer or one under an engine, each trained once."""
    known = {}

    def train(engine):
        if engine not in known:
            own = {"memory_opt_engine": engine, "memory_opt_level": 1} if engine else {"plain": True}
            trainer = make(tmp_path_factory.mktemp("run"), "gpt2", eval_strategy="steps", eval_steps=2, **own)
            before = trainer.evaluate()["eval_loss"]
            trainer.train()
            during = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
            predicted = trainer.predict(rows("gpt2", 6, seed=1))
            known[engine] = Evaluated(trainer, [before, *during, trainer.evaluate()["eval_loss"]], predicted)
        return known[engine]

    return train


def test_evaluation_and_prediction_are_the_plain_ones(evaluated, engine):
    """Before, during and after training, through the model's own forward."""
    plain, ours = evaluated(""), evaluated(engine)
    assert distance(weights(engine_model(ours.trainer)), weights(plain.trainer.model)) < CLOSE
    assert len(set(plain.losses)) > 2
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(ours.predicted.predictions), torch.tensor(plain.predicted.predictions), rtol=1e-3, atol=1e-4
    )
    assert (ours.predicted.label_ids == plain.predicted.label_ids).all()


def test_training_twice_in_a_row(tmp_path):
    finals = []
    for plain in (True, False):
        trainer = make(tmp_path, "roberta-classification", plain=plain)
        with log_lines() as lines:
            trainer.train()
            trainer.train()
        finals.append(weights(trainer.model))
    assert distance(finals[1], finals[0]) < CLOSE
    assert len(tables(lines)) == 2, "each run shows its table"
    engine_model(trainer)


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


# Other ways to get an engine into a training.


def test_attach_to_a_stock_trainer(tmp_path, plain_weights, engine):
    trainer = make(tmp_path, "gpt2", plain=True)
    config = CONFIGS["gpt2"]
    attachment = attach(trainer, memory_opt_engine=engine, memory_opt_config=config)
    assert type(trainer) is Trainer and type(trainer.args) is TrainingArguments
    assert attachment is trainer.memopt and attachment.table is None
    with pytest.raises(MemOptError, match="this Trainer has an engine already"):
        attach(trainer, memory_opt_level=1)
    trainer.train()
    engine_model(trainer)
    assert [plan.config for plan in attachment.table.enabled if plan.requested_count] == [config]
    assert distance(weights(trainer.model), plain_weights("gpt2")) < CLOSE
    assert attachment.measured_peak_mib > 100
    assert f"{config} (1 of 1)" in run_summary(trainer)


def test_attach_reads_the_arguments_of_the_package(tmp_path):
    args = arguments(MemOptTrainingArguments, tmp_path, memory_opt_level=1)
    trainer = Trainer(build("gpt2"), args, data_collator=collate, train_dataset=rows("gpt2"))
    with pytest.raises(MemOptError, match="needs a Trainer with an engine"):
        run_summary(trainer)
    attach(trainer)
    trainer.train()
    assert len(trainer.memopt.table.enabled) > 2


class Overrides:
    """Everything that a subclass usually overrides, with an effect on the weights."""

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


def test_a_users_optimizer_and_scheduler(tmp_path):
    finals = []
    for plain in (True, False):
        model = build("gpt2")
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
        trainer = make(tmp_path, "gpt2", plain=plain, model=model, optimizers=(optimizer, scheduler))
        trainer.train()
        assert scheduler.get_last_lr() == pytest.approx([1e-5])
        finals.append(weights(model))
    engine_model(trainer)
    assert distance(finals[1], finals[0]) < CLOSE


def test_an_optimizer_class_of_the_users_choice(tmp_path):
    chosen = {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-3})}
    plain, ours = (make(tmp_path, "gpt2", plain=plain, **chosen) for plain in (True, False))
    plain.train()
    ours.train()
    assert isinstance(engine_model(ours) and ours.optimizer.optimizer, torch.optim.Adagrad)
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


def test_the_trained_model_generates_and_copies(evaluated, engine):
    trainer = evaluated(engine).trainer
    plain = build("gpt2").eval()
    plain.load_state_dict(trainer.model.state_dict())
    prompt = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    copied = copy.deepcopy(trainer.model)
    for model in (trainer.model.eval(), copied.eval()):
        asked = {**prompt, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
        assert model.generate(**asked).tolist() == plain.generate(**asked).tolist()
    assert engine_of(copied) is None
    assert trainer.model.train()(**ZOO["gpt2"].batch()).past_key_values is None, "nobody reads it in training"
    # The copy trains by itself, by its own forward, and leaves the original alone.
    before = weights(trainer.model)
    copied.train()(**ZOO["gpt2"].batch()).loss.backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert distance(weights(trainer.model), before) == 0


class Interrupt(TrainerCallback):
    """Ctrl-C between a forward and its optimizer step."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise KeyboardInterrupt


def test_an_interrupted_run_evaluates_and_trains_on(tmp_path):
    trainer = make(
        tmp_path,
        "roberta-classification",
        model=build("roberta-classification", hidden_dropout_prob=0.1),
        memory_opt_config="Dropout+:1:-1",
        log_memory_phases=True,
        log_input_density=True,
        gradient_accumulation_steps=2,
    )
    interrupt = Interrupt()
    trainer.add_callback(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.remove_callback(interrupt)
    trainer.train()
    assert trainer.state.global_step == 5
    assert trainer.memopt.table.enabled


def test_rows_make_a_short_last_batch():
    assert ROWS % 4 == 2
