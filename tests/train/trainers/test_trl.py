"""TRL's trainers with an engine against the same script without: losses, all that they log, and weights."""

import functools
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from datasets import Dataset
from peft import LoraConfig
from transformers import BertForSequenceClassification, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from tests.rotation import nightly
from tests.train.trainers.harness import (
    ORT_TOLERANCE,
    Memopt,
    Outcome,
    arguments,
    assert_equal,
    bert_config,
    llama_config,
    outcome,
    run,
    sentence,
    tokenizer,
)
from tests.trainer_runs import log_lines

# TRL asks for bf16 and activation checkpointing by default.
QUIET = {"bf16": False, "gradient_checkpointing": False, "max_length": 32}


def texts(count: int, seed: int = 0) -> Dataset:
    source = random.Random(seed)
    return Dataset.from_list([{"text": sentence(source)} for _ in range(count)])


def preferences(count: int) -> Dataset:
    source = random.Random(0)
    rows = [{name: sentence(source) for name in ("prompt", "chosen", "rejected")} for _ in range(count)]
    return Dataset.from_list([{**row, "prompt": row["prompt"] + " "} for row in rows])


def lora() -> LoraConfig:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")


def sft(folder: Path, memopt: Memopt, peft_config: LoraConfig | None = None, **changes: Any) -> Outcome:
    trainer = SFTTrainer(
        model=LlamaForCausalLM(llama_config()),
        args=arguments(SFTConfig, folder, eval_strategy="steps", eval_steps=3, **{**QUIET, **changes}),
        train_dataset=texts(24),
        eval_dataset=texts(8, seed=1),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    memopt.attach(trainer)
    trainer.train()
    return outcome(trainer)


def sft_lora(folder: Path, memopt: Memopt, **changes: Any) -> Outcome:
    return sft(folder, memopt, lora(), **changes)


def dpo(folder: Path, memopt: Memopt, peft_config: LoraConfig | None = None, **changes: Any) -> Outcome:
    # Without LoRA the reference model is loaded from where the model came from.
    LlamaForCausalLM(llama_config()).save_pretrained(folder / "model")
    trainer = DPOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        args=arguments(DPOConfig, folder, **{**QUIET, **changes}),
        train_dataset=preferences(24),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    memopt.attach(trainer)
    trainer.train()
    return outcome(trainer)


def dpo_lora(folder: Path, memopt: Memopt) -> Outcome:
    return dpo(folder, memopt, lora())


def reward(folder: Path, memopt: Memopt) -> Outcome:
    trainer = RewardTrainer(
        model=BertForSequenceClassification(bert_config(num_labels=1)),
        args=arguments(RewardConfig, folder, **QUIET),
        train_dataset=preferences(24).remove_columns("prompt"),
        processing_class=tokenizer(),
    )
    memopt.attach(trainer)
    trainer.train()
    return outcome(trainer)


@pytest.mark.parametrize("script", nightly([sft, dpo, reward, sft_lora, dpo_lora]))
def test_compiled_bitwise(script, stock, tmp_path):
    ours = run(script, tmp_path, "compile")
    assert ours.plans_on
    assert_equal(ours, stock(script.__name__, script))


def test_reward_on_onnx_runtime(stock, tmp_path):
    ours = run(reward, tmp_path, "ort")
    assert ours.plans_on
    assert_equal(ours, stock("reward", reward), ORT_TOLERANCE)


@pytest.mark.parametrize("script", nightly([sft, sft_lora, dpo], but=[sft_lora]))
def test_its_own_defaults_under_auto(script, tmp_path):
    """TRL asks for activation checkpointing; ONNX Runtime cannot train what SFT and DPO do, compile can."""
    asked = functools.partial(script, gradient_checkpointing=True)
    with log_lines() as lines:
        ours = run(asked, tmp_path / "ours", "auto")
    assert ours.engine == "compile" and ours.plans_on
    assert sum("training with the compile engine" in line for line in lines) == 1, lines
    assert not any("requires_grad_" in line for line in lines), "the embeddings' hooks split the graph"
    assert_equal(ours, run(asked, tmp_path / "stock", "none"), ORT_TOLERANCE)
