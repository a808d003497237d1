"""TRL's trainers with an engine against the same script without one: losses, all log entries, and weights."""

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

import trl
from datasets import Dataset
from peft import LoraConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import BertForSequenceClassification, LlamaForCausalLM, Trainer, set_seed
from transformers.integrations import TensorBoardCallback

from optimum_memopt import InputDensityCallback, MemoryPhasesCallback, PlanStatsCallback, UnsupportedModelError
from tests.rotation import nightly
from tests.train.trainers import harness
from tests.train.trainers.harness import Memopt, Outcome
from tests.trainer_runs import log_lines

# TRL enables bf16 and activation checkpointing by default.
UNCHECKED = {"bf16": False, "gradient_checkpointing": False}
QUIET = {**UNCHECKED, "max_length": 32}
SAMPLED = {**UNCHECKED, "num_generations": 2, "max_completion_length": 5, "max_steps": 4}


def texts(count: int, seed: int = 0) -> Dataset:
    source = random.Random(seed)
    return Dataset.from_list([{"text": harness.sentence(source)} for _ in range(count)])


def preferences(count: int) -> Dataset:
    source = random.Random(0)
    rows = [{name: harness.sentence(source) for name in ("prompt", "chosen", "rejected")} for _ in range(count)]
    return Dataset.from_list([{**row, "prompt": row["prompt"] + " "} for row in rows])


def lora() -> LoraConfig:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")


def sft(folder: Path, memopt: Memopt, peft_config: LoraConfig | None = None, **changes: Any) -> Outcome:
    trainer = trl.SFTTrainer(
        model=LlamaForCausalLM(harness.llama_config()),
        args=harness.arguments(trl.SFTConfig, folder, eval_strategy="steps", eval_steps=3, **{**QUIET, **changes}),
        train_dataset=texts(24),
        eval_dataset=texts(8, seed=1),
        processing_class=harness.tokenizer(),
        peft_config=peft_config,
    )
    return harness.trained(trainer, memopt)


def sft_lora(folder: Path, memopt: Memopt, **changes: Any) -> Outcome:
    return sft(folder, memopt, lora(), **changes)


def dpo(folder: Path, memopt: Memopt, peft_config: LoraConfig | None = None, **changes: Any) -> Outcome:
    # Without LoRA the reference model is loaded from the model's folder.
    LlamaForCausalLM(harness.llama_config()).save_pretrained(folder / "model")
    trainer = trl.DPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        args=harness.arguments(trl.DPOConfig, folder, **{**QUIET, **changes}),
        train_dataset=preferences(24),
        processing_class=harness.tokenizer(),
        peft_config=peft_config,
    )
    return harness.trained(trainer, memopt)


def dpo_lora(folder: Path, memopt: Memopt) -> Outcome:
    return dpo(folder, memopt, lora())


def reward(folder: Path, memopt: Memopt) -> Outcome:
    trainer = trl.RewardTrainer(
        model=BertForSequenceClassification(harness.bert_config(num_labels=1)),
        args=harness.arguments(trl.RewardConfig, folder, **QUIET),
        train_dataset=preferences(24).remove_columns("prompt"),
        processing_class=harness.tokenizer(),
    )
    return harness.trained(trainer, memopt)


def prompts(count: int) -> Dataset:
    source = random.Random(0)
    return Dataset.from_list([{"prompt": harness.sentence(source)} for _ in range(count)])


def distinct(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that differs between completions with the same number of words."""
    return [float(len(set(completion.split()))) for completion in completions]


def model(seed: int = 0) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(harness.llama_config())


def grpo(folder: Path, memopt: Memopt, peft_config: LoraConfig | None = None, **changes: Any) -> Outcome:
    trainer = trl.GRPOTrainer(
        model=model(),
        reward_funcs=distinct,
        args=harness.arguments(trl.GRPOConfig, folder, **{**SAMPLED, **changes}),
        train_dataset=prompts(16),
        processing_class=harness.tokenizer(),
        peft_config=peft_config,
    )
    return harness.trained(trainer, memopt)


def grpo_again(folder: Path, memopt: Memopt) -> Outcome:
    """Run two optimizer steps on the same completions; a forward without gradients computes the old probabilities."""
    return grpo(folder, memopt, num_iterations=2)


def grpo_lora_accumulated(folder: Path, memopt: Memopt) -> Outcome:
    """Run GRPO with LoRA and accumulation; the reference is the model without its adapter."""
    return grpo(folder, memopt, lora(), beta=0.1, gradient_accumulation_steps=2)


def rloo(folder: Path, memopt: Memopt) -> Outcome:
    model().save_pretrained(folder / "model")
    trainer = trl.RLOOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=distinct,
        args=harness.arguments(trl.RLOOConfig, folder, **SAMPLED),
        train_dataset=prompts(16),
        processing_class=harness.tokenizer(),
    )
    return harness.trained(trainer, memopt)


def kto(folder: Path, memopt: Memopt) -> Outcome:
    source = random.Random(0)
    rows = [
        {"prompt": harness.sentence(source) + " ", "completion": harness.sentence(source), "label": n % 2 == 0}
        for n in range(24)
    ]
    model().save_pretrained(folder / "model")
    trainer = trl.KTOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        args=harness.arguments(trl.KTOConfig, folder, **QUIET),
        train_dataset=Dataset.from_list(rows),
        processing_class=harness.tokenizer(),
    )
    return harness.trained(trainer, memopt)


def distillation(folder: Path, memopt: Memopt) -> Outcome:
    trainer = trl.DistillationTrainer(
        model=model(),
        teacher_model=model(seed=1),
        args=harness.arguments(
            trl.DistillationConfig, folder, **{**UNCHECKED, "max_completion_length": 5, "max_steps": 4}
        ),
        train_dataset=prompts(16),
        processing_class=harness.tokenizer(),
    )
    return harness.trained(trainer, memopt)


SCRIPTS = [sft, dpo, reward, sft_lora, dpo_lora, grpo, grpo_again, grpo_lora_accumulated, rloo, kto]


@pytest.mark.parametrize("script", nightly(SCRIPTS))
def test_compiled_bitwise(script, stock, tmp_path):
    harness.check(script, stock, tmp_path, "compile")


def test_reward_on_onnx_runtime(stock, tmp_path):
    harness.check(reward, stock, tmp_path, "ort")


@pytest.mark.parametrize("script", nightly([sft, sft_lora, dpo], but=[sft_lora]))
def test_its_own_defaults_under_auto(script, tmp_path):
    """TRL's defaults, with activation checkpointing, train under auto, which switches from ONNX Runtime to compile."""
    asked = functools.partial(script, gradient_checkpointing=True)
    with log_lines() as lines:
        ours = harness.run(asked, tmp_path / "ours", "auto")
    assert ours.engine == "compile" and ours.plans_on
    assert sum("training with the compile engine" in line for line in lines) == 1, lines
    assert not any("requires_grad_" in line for line in lines), "the embeddings' hooks split the graph"
    harness.assert_equal(ours, harness.run(asked, tmp_path / "stock", "none"), harness.ORT_TOLERANCE)


class BelowTheHead(Memopt):
    """Optimizes only the model below the head, since the trainer calls that and computes the logits itself."""

    def attach(self, trainer: Trainer) -> None:
        self.optimize(trainer.model.base_model)


def test_a_part_that_is_called_alone_is_optimized_alone(stock, tmp_path):
    with pytest.raises(UnsupportedModelError, match="calls submodules of LlamaForCausalLM instead of.*level 1"):
        harness.run(distillation, tmp_path / "refused", "compile")
    set_seed(0)
    memopt = BelowTheHead("compile")
    ours = memopt.note(distillation(tmp_path / "part", memopt))
    assert ours.plans_on
    harness.assert_equal(ours, stock("distillation", distillation))


class Observed:
    """Attaches callbacks to a trainer instead of an engine."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = callbacks

    def attach(self, trainer: Trainer) -> None:
        for callback in (TensorBoardCallback(), *self.callbacks):
            trainer.add_callback(callback)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns TensorBoard's curves of a run, without times."""
    (file,) = folder.rglob("events.*")
    events = EventAccumulator(str(file))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.replace("/", "_").endswith(harness.TIMES)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("script", nightly([sft, dpo, reward, grpo], but=[sft, grpo]))
def test_observers_leave_log_entries_as_they_are(tmp_path, monkeypatch, script):
    """Observers do not change log entries, although TRL's trainers average and clear their own counters in `log`."""
    observers = [InputDensityCallback(log_steps=1), MemoryPhasesCallback(log_steps=1), PlanStatsCallback()]
    found = {}
    for name, callbacks in (("plain", []), ("observed", observers)):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / name))
        set_seed(0)
        done = script(tmp_path / f"{name}-run", Observed(*callbacks))
        found[name] = done.logs, curves(tmp_path / name)
    (logs, plain), (logs_observed, observed) = found.values()
    assert logs_observed == logs and "train_loss" in logs[-1] and len(logs[0]) > 6, "TRL's own numbers"
    ours = {tag for tag in observed if tag.startswith("train/memopt/")}
    assert {tag: curve for tag, curve in observed.items() if tag not in ours} == plain
    steps = [step for step, _ in observed["train/memopt/post_backward/resident_mib"]]
    assert steps == list(range(1, steps[-1] + 1)) and len(steps) >= 4
    assert torch.isfinite(torch.tensor(observed["train/memopt/measured_peak_mib"])).all()
