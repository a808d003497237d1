"""Checkpoints of MemOptTrainer are the plain Trainer's, and a run goes on from them as if it had never stopped."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2LMHeadModel

from optimum_memopt import MemOptTrainingArguments
from optimum_memopt.engines.shared.in_place import engine_of
from tests.model_zoo import ZOO
from tests.trainer_runs import build, distance, log_lines, make, tables, weights

CLOSE = 1e-5
SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_opt_level": 1},
        {"memory_opt_config": "FastGelu+Reshape+:1:-1", "gradient_accumulation_steps": 2, "warmup_steps": 4},
    ],
    ids=["level", "config-accumulation"],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, changes):
    whole = make(tmp_path / "whole", "gpt2", **SAVING, **changes)
    whole.train()
    expected = weights(whole.model)

    # Another start, so that only the checkpoint can lead to the same end.
    other = build("gpt2", seed=5)
    assert distance(weights(other), weights(build("gpt2"))) > 0.1
    resumed = make(tmp_path / "resumed", "gpt2", model=other, **SAVING, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert resumed.memopt.table.enabled
    assert distance(weights(resumed.model), expected) < CLOSE
    assert (
        distance(
            load_file(tmp_path / "whole" / "checkpoint-3" / "model.safetensors"),
            {name: expected[name] for name in load_file(tmp_path / "whole" / "checkpoint-3" / "model.safetensors")},
        )
        > 100 * CLOSE
    ), "the second half of the run changed nothing"


@pytest.mark.parametrize("first_plain", [True, False], ids=["plain-to-ort", "ort-to-plain"])
def test_checkpoints_pass_between_plain_and_ort(tmp_path, first_plain):
    first = make(tmp_path, "roberta-classification", plain=first_plain, **SAVING)
    first.train()
    second = make(tmp_path, "roberta-classification", plain=not first_plain, **SAVING)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert distance(weights(second.model), weights(first.model)) < CLOSE


def test_the_files_are_the_plain_trainers(tmp_path):
    saved = {}
    for kind in ("plain", "ours"):
        trainer = make(tmp_path / kind, "gpt2", plain=kind == "plain", **SAVING)
        trainer.train()
        trainer.save_model(tmp_path / kind / "final")
        saved[kind] = {
            str(path.relative_to(tmp_path / kind)) for path in (tmp_path / kind).rglob("*") if path.is_file()
        }
        saved[f"{kind}-tensors"] = load_file(tmp_path / kind / "final" / "model.safetensors")
        saved[f"{kind}-config"] = json.loads((tmp_path / kind / "final" / "config.json").read_text())
    assert saved["ours"] == saved["plain"] and "checkpoint-3/optimizer.pt" in saved["ours"]
    assert distance(saved["ours-tensors"], saved["plain-tensors"]) < CLOSE
    assert saved["ours-config"] == saved["plain-config"]
    args = torch.load(tmp_path / "ours" / "final" / "training_args.bin", weights_only=False)
    assert isinstance(args, MemOptTrainingArguments)


@pytest.mark.parametrize("how", ["save_model", "save_pretrained"])
@pytest.mark.parametrize(
    ("name", "auto"),
    [("gpt2", AutoModelForCausalLM), ("roberta-classification", AutoModelForSequenceClassification)],
)
def test_saved_models_load_in_plain_transformers(tmp_path, name, auto, how):
    trainer = make(tmp_path, name, memory_opt_level=1, max_steps=2)
    trainer.train()
    (trainer.save_model if how == "save_model" else trainer.model.save_pretrained)(str(tmp_path / "saved"))
    loaded = auto.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    assert engine_of(loaded) is None and type(loaded) is type(trainer.model)
    batch = ZOO[name].batch(seed=3)
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, trainer.model.eval()(**batch).logits)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    # The learning rate is high enough that the evaluation gets worse again after a few steps.
    changes = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "learning_rate": 0.3,
        "max_steps": 6,
    }
    plain = make(tmp_path / "plain", "gpt2", plain=True, **changes)
    ours = make(tmp_path / "ours", "gpt2", memory_opt_level=1, **changes)
    plain.train()
    ours.train()
    assert ours.state.best_global_step == plain.state.best_global_step < 6
    assert ours.memopt.table.enabled
    best = load_file(tmp_path / "ours" / f"checkpoint-{ours.state.best_global_step}" / "model.safetensors")
    found = weights(ours.model)
    assert distance({name: found[name] for name in best}, best) == 0
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, rel=1e-6)
    assert ours.state.best_metric == pytest.approx(plain.state.best_metric, rel=1e-4)


def test_the_model_that_model_init_makes_is_the_one_that_ort_trains(tmp_path):
    made = []

    def model_init():
        made.append(build("gpt2"))
        return made[-1]

    plain = make(tmp_path, "gpt2", plain=True, model_init=lambda: build("gpt2"))
    trainer = make(tmp_path, "gpt2", model_init=model_init, memory_opt_level=1)
    at_construction = trainer.model
    for run in (1, 2):
        plain.train()
        with log_lines() as lines:
            trainer.train()
        assert len(made) == run + 1 and trainer.model is made[-1] is not at_construction
        assert [engine_of(model) for model in made] == [None] * (run + 1)
        assert len(tables(lines)) == 1
        assert distance(weights(trainer.model), weights(plain.model)) < CLOSE
    assert trainer.evaluate()["eval_loss"] > 0
    assert isinstance(trainer.model, GPT2LMHeadModel)
