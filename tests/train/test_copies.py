"""Copies and pickles of models, also in spawned workers, and of Trainers are plain while an engine trains."""

import copy
import io
import multiprocessing
import pickle

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, TrainerCallback

from optimum_memopt import MemoryPhasesCallback, MemoryReportCallback, attach, optimize
from optimum_memopt.engines.shared.in_place import engine_of
from tests.rotation import nightly
from tests.trainer_runs import CASES, build, distance, log_lines, make, weights

NAME = "small"


def reloaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": reloaded,
}


def attributes(model):
    """Returns the names of all modules' attributes, with the number of hooks in each dictionary of hooks."""
    return [
        {
            name: len(value) if isinstance(value, dict) and "hooks" in name else None
            for name, value in vars(each).items()
        }
        for each in model.modules()
    ]


def gradients(model, batch):
    model.zero_grad()
    model.train()(**batch).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Copies(TrainerCallback):
    """Copies a Trainer's model in each way at the end of the first step, and also the Trainer."""

    def __init__(self, ways=WAYS):
        self.ways, self.trainer, self.made, self.of_trainer = ways, None, {}, None

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            self.made = {name: way(model) for name, way in self.ways.items()}
            self.pickled = pickle.dumps(model)
            trainer, self.trainer = self.trainer, None
            self.of_trainer = copy.deepcopy(trainer) if trainer is not None else None


@pytest.mark.parametrize("name, changes", [
    (NAME, {"memory_opt_level": 1}),
    pytest.param(
        "gpt2",
        {"memory_opt_unit": "layer", "memory_opt_budget": "64GiB", "memory_opt_engine": "compile"},
        marks=pytest.mark.nightly,
    ),
])  # fmt: skip
def test_a_copy_of_a_model_that_is_trained_is_plain(tmp_path, engine, name, changes):
    if changes.get("memory_opt_engine", engine) != engine:
        pytest.skip("an option of the compile engine")
    stock, copies, plain, model = Copies(), Copies(), CASES[name].build(), CASES[name].build()
    asked = {"memory_opt_engine": engine, "log_memory_phases": True, "log_input_density": True, **changes}
    make(tmp_path, name, plain=True, model=plain, callbacks=[stock], max_steps=2).train()
    make(tmp_path, name, model=model, callbacks=[copies], max_steps=2, **asked).train()
    assert b"memopt" not in copies.pickled
    batch = CASES[name].batch()
    for way, copied in copies.made.items():
        assert engine_of(copied) is None and type(copied) is type(model)
        assert attributes(copied) == attributes(stock.made[way]), way
        plain.load_state_dict(copied.state_dict())
        assert distance(gradients(copied, batch), gradients(plain, batch)) == 0, way
    assert attributes(model) == attributes(plain)


def test_a_copy_of_a_model_in_a_loop_is_plain_and_can_have_an_engine():
    model, plain = build(NAME), build(NAME)
    plain.load_state_dict(model.state_dict())
    batch = CASES[NAME].batch()
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1)
    model(**batch).loss.backward()
    for way in WAYS.values():
        copied = way(model)
        assert attributes(copied) == attributes(plain) and engine_of(copied) is None
    of_copy = optimize(copied, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=2)
    assert distance(gradients(copied, batch), gradients(plain, batch)) == 0
    assert of_copy.plans().enabled and engine_of(model) is engine


def test_a_forward_of_the_user_s_stays_in_copies():
    model, called = build(NAME), []
    own = type(model).forward
    model.forward = lambda *args, **kwargs: called.append(1) or own(model, *args, **kwargs)
    before = model.forward
    engine = optimize(model, memory_opt_engine="compile", memory_opt_compiler="aot_eager")
    assert vars(copy.deepcopy(model))["forward"] is before and model.forward is not before
    engine.detach()
    assert model.forward is before


def test_a_hook_of_the_user_s_stays_in_copies(tmp_path):
    seen = []

    class Hooks(Copies):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.register_forward_hook(lambda module, inputs, outputs: seen.append(module))

    hooks = Hooks({"deepcopy": copy.deepcopy})
    trainer = make(tmp_path, NAME, plain=True, callbacks=[MemoryPhasesCallback(), MemoryReportCallback(), hooks])
    hooks.on_step_end = lambda *args, model, **kwargs: hooks.made.update(made=copy.deepcopy(model))
    trainer.train()
    copied = hooks.made["made"]
    assert len(copied._forward_hooks) == 1 and not copied._forward_pre_hooks
    copied(**CASES[NAME].batch())
    assert seen[-1] is copied


class Seq2SeqCollator(DataCollatorForSeq2Seq):
    """Checks in the worker that its model is plain."""

    def __call__(self, features, return_tensors=None):
        assert torch.utils.data.get_worker_info() is not None
        hooks = [name for each in attributes(self.model) for name, count in each.items() if count]
        assert "forward" not in vars(self.model) and not hooks, hooks
        return super().__call__(features, return_tensors)


@pytest.mark.nightly
def test_spawned_workers_get_a_collator_that_holds_the_model(tmp_path, monkeypatch):
    """Spawned workers, as on macOS, Windows and Python 3.14, get a collator whose model is plain."""
    model = build("t5")
    vocabulary = {"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, 20)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w2")), pad_token="<pad>", eos_token="</s>"
    )
    examples = [{"input_ids": list(range(2, 6 + n)), "labels": list(range(3, 6 + n))} for n in range(8)]
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        trainer = make(
            tmp_path,
            "t5",
            model=model,
            train_dataset=examples,
            data_collator=Seq2SeqCollator(tokenizer, model=model),
            dataloader_num_workers=1,
            max_steps=2,
            memory_opt_engine="compile",
            memory_opt_level=1,
            log_memory_phases=True,
        )
        trainer.train()
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert trainer.state.global_step == 2 and trainer.memopt.table.enabled


class Unhashable(TrainerCallback):
    __hash__ = None


@pytest.mark.parametrize("during", nightly([False, True], but=[False]))
def test_a_copy_of_a_trainer_trains_its_own_model_in_plain_pytorch(tmp_path, during):
    copies, given = Copies({}), MemoryPhasesCallback()
    trainer = make(
        tmp_path,
        NAME,
        callbacks=[copies, given, Unhashable()],
        max_steps=2,
        memory_opt_engine="compile",
        memory_opt_level=1,
        log_input_density=True,
    )
    with log_lines() as lines:
        if during:
            copies.trainer = trainer
            trainer.train()
            copied = copies.of_trainer
        else:
            copied = copy.deepcopy(trainer)
    assert sum("a copy of a Trainer trains in plain PyTorch" in line for line in lines) == 1
    plain = make(tmp_path, NAME, plain=True, max_steps=2)
    assert {name for name in vars(copied) if name in ("memopt", "train", "training_step", "compute_loss")} == set()
    kinds = [type(callback) for callback in copied.callback_handler.callbacks]
    assert [kind for kind in kinds if kind not in (type(each) for each in plain.callback_handler.callbacks)] == [
        Copies, MemoryPhasesCallback, Unhashable
    ]  # fmt: skip
    before, of_original = weights(copied.model), weights(trainer.model)
    plain.model.load_state_dict(before)
    if not during:
        copied.optimizer = None
        copied.train()
        plain.train()
        assert distance(weights(copied.model), weights(plain.model)) == 0
    assert distance(weights(trainer.model), of_original) == 0
    attach(copied, memory_opt_level=2)
    copied.train()
    assert copied.memopt.table.enabled and copied.memopt.engine is not trainer.memopt.engine
    assert distance(weights(trainer.model), of_original) == 0
    trainer.train()
    assert distance(weights(trainer.model), of_original) > 0
