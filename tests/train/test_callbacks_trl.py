"""TRL's trainers average and clear counters of their own in `log`: their entries are what they are without us."""

import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    set_seed,
)

from optimum_memopt import InputDensityCallback, MemoryPhasesCallback, PlanStatsCallback

trl = pytest.importorskip("trl", reason="TRL is an extra of the tests")

WORDS = [f"w{number}" for number in range(40)]
# They hold times.
CLOCKED = ("_runtime", "_per_second", "step_time")


def tokenizer():
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(length, offset):
    return " ".join(WORDS[(offset + 7 * place) % len(WORDS)] for place in range(length))


def model(kind=LlamaForCausalLM, **changes):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(
        LlamaConfig(vocab_size=43, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **sizes, **changes)
    )


TEXTS = {"text": [text(5 + row % 6, row) for row in range(12)]}
PAIRS = {
    "prompt": [text(3, row) for row in range(12)],
    "chosen": [text(5 + row % 3, row) for row in range(12)],
    "rejected": [text(3, row + 1) for row in range(12)],
}
COMPARED = {name: PAIRS[name] for name in ("chosen", "rejected")}
PROMPTS = {"prompt": PAIRS["prompt"]}


def longest(completions, **_):
    return [float(len(completion)) for completion in completions]


# Data, what TRL's config needs of it, and what its trainer needs.
TRAINERS = {
    "SFT": (TEXTS, {}, dict),
    "DPO": (PAIRS, {}, lambda: {"ref_model": model()}),
    "Reward": (COMPARED, {}, dict),
    "GRPO": (PROMPTS, {"num_generations": 2, "max_completion_length": 4}, lambda: {"reward_funcs": [longest]}),
}


def logged(folder, name, callbacks):
    data, arguments, others = TRAINERS[name]
    set_seed(0)
    trainer = getattr(trl, f"{name}Trainer")(
        model=model(LlamaForSequenceClassification, num_labels=1) if name == "Reward" else model(),
        args=getattr(trl, f"{name}Config")(
            str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="tensorboard",
            save_strategy="no",
            disable_tqdm=True,
            per_device_train_batch_size=2,
            max_steps=4,
            logging_steps=2,
            **arguments,
        ),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        callbacks=callbacks,
        **others(),
    )
    trainer.train()
    return [
        {key: value for key, value in entry.items() if not key.endswith(CLOCKED)}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("name", TRAINERS)
def test_log_entries_are_what_they_are_without_us(tmp_path, monkeypatch, name):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "plain"))
    expected = logged(tmp_path, name, [])
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "observed"))
    observers = [InputDensityCallback(log_steps=1), MemoryPhasesCallback(log_steps=1), PlanStatsCallback()]
    found = logged(tmp_path, name, observers)
    assert found == expected
    assert "train_loss" in found[-1] and len(found) == 3 and len(found[0]) > 6, "TRL's own numbers"

    curves = {}
    for run in ("plain", "observed"):
        (file,) = (tmp_path / run).rglob("events.*")
        events = EventAccumulator(str(file))
        events.Reload()
        curves[run] = {
            tag: [(event.step, event.value) for event in events.Scalars(tag)]
            for tag in events.Tags()["scalars"]
            if not tag.endswith(CLOCKED)
        }
    ours = {tag for tag in curves["observed"] if tag.startswith("train/memopt/")}
    assert {tag: curve for tag, curve in curves["observed"].items() if tag not in ours} == curves["plain"]
    assert [step for step, _ in curves["observed"]["train/memopt/post_backward/resident_mib"]] == [1, 2, 3, 4]
    assert torch.isfinite(torch.tensor(curves["observed"]["train/memopt/measured_peak_mib"])).all()
