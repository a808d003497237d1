"""TRL's trainers that generate what they train on, or compare with a second model: with an engine as without."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaForCausalLM, Trainer, set_seed
from trl import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
)

from optimum_memopt import UnsupportedModelError
from tests.rotation import nightly
from tests.train.trainers.harness import (
    Memopt,
    Outcome,
    arguments,
    assert_equal,
    llama_config,
    outcome,
    run,
    sentence,
    tokenizer,
)
from tests.train.trainers.test_trl import lora

# TRL asks for bf16 and activation checkpointing by default.
QUIET = {"bf16": False, "gradient_checkpointing": False}
SAMPLED = {**QUIET, "num_generations": 2, "max_completion_length": 5, "max_steps": 4}


def prompts(count: int) -> Dataset:
    source = random.Random(0)
    return Dataset.from_list([{"prompt": sentence(source)} for _ in range(count)])


def distinct(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs among completions of as many words."""
    return [float(len(set(completion.split()))) for completion in completions]


def model(seed: int = 0) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(llama_config())


def trained(trainer: Any, memopt: Memopt) -> Outcome:
    memopt.attach(trainer)
    trainer.train()
    return outcome(trainer)


def grpo(folder: Path, memopt: Memopt, peft_config: LoraConfig | None = None, **changes: Any) -> Outcome:
    trainer = GRPOTrainer(
        model=model(),
        reward_funcs=distinct,
        args=arguments(GRPOConfig, folder, **{**SAMPLED, **changes}),
        train_dataset=prompts(16),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    return trained(trainer, memopt)


def grpo_again(folder: Path, memopt: Memopt) -> Outcome:
    """Two optimizer steps on the same completions, whose first probabilities a forward without gradients computes."""
    return grpo(folder, memopt, num_iterations=2)


def grpo_lora_accumulated(folder: Path, memopt: Memopt) -> Outcome:
    """The reference is the model without its adapter."""
    return grpo(folder, memopt, lora(), beta=0.1, gradient_accumulation_steps=2)


def rloo(folder: Path, memopt: Memopt) -> Outcome:
    model().save_pretrained(folder / "model")
    trainer = RLOOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=distinct,
        args=arguments(RLOOConfig, folder, **SAMPLED),
        train_dataset=prompts(16),
        processing_class=tokenizer(),
    )
    return trained(trainer, memopt)


def kto(folder: Path, memopt: Memopt) -> Outcome:
    source = random.Random(0)
    rows = [
        {"prompt": sentence(source) + " ", "completion": sentence(source), "label": index % 2 == 0}
        for index in range(24)
    ]
    model().save_pretrained(folder / "model")
    trainer = KTOTrainer(
        model=LlamaForCausalLM.from_pretrained(folder / "model"),
        args=arguments(KTOConfig, folder, **QUIET, max_length=32),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    return trained(trainer, memopt)


def distillation(folder: Path, memopt: Memopt) -> Outcome:
    trainer = DistillationTrainer(
        model=model(),
        teacher_model=model(seed=1),
        args=arguments(DistillationConfig, folder, **{**QUIET, "max_completion_length": 5, "max_steps": 4}),
        train_dataset=prompts(16),
        processing_class=tokenizer(),
    )
    return trained(trainer, memopt)


class BelowTheHead(Memopt):
    """The trainer projects to the vocabulary by itself, and calls what is below."""

    def attach(self, trainer: Trainer) -> None:
        self.optimize(trainer.model.base_model)


def test_a_part_that_is_called_alone_is_optimized_alone(stock, tmp_path):
    with pytest.raises(UnsupportedModelError, match="calls parts of LlamaForCausalLM, and not its forward.*level 1"):
        run(distillation, tmp_path / "refused", "compile")
    set_seed(0)
    memopt = BelowTheHead("compile")
    ours = memopt.note(distillation(tmp_path / "part", memopt))
    assert ours.plans_on
    assert_equal(ours, stock("distillation", distillation))


@pytest.mark.parametrize("script", nightly([grpo, grpo_again, grpo_lora_accumulated, rloo, kto]))
def test_compiled_bitwise(script, stock, tmp_path):
    ours = run(script, tmp_path, "compile")
    assert ours.plans_on
    assert_equal(ours, stock(script.__name__, script))
