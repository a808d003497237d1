"""Runs third-party training scripts without this package and with each engine, and compares the outcomes."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, LlamaConfig, PreTrainedTokenizerFast, Trainer, set_seed

from optimum_memopt import PlanTable, attach, optimize

WORDS = ["<unk>", "<pad>", "<s>", "</s>", *(f"word{index}" for index in range(36))]
ENGINES: dict[str, dict[str, Any]] = {
    # The plain loss is bitwise; `test_chunked_loss.py` tests the chunked one.
    "compile": {
        "memory_opt_engine": "compile",
        "memory_opt_compiler": "aot_eager",
        "memory_opt_level": 1,
        "memory_opt_loss": "plain",
    },
    # No fallback: plain PyTorch would pass every comparison.
    "ort": {"memory_opt_engine": "ort", "ort_fallback": False, "memory_opt_level": 1},
    "auto": {"memory_opt_engine": "auto", "ort_fallback": False, "memory_opt_level": 1},
}
# Endings of the keys in a log entry whose values depend on the clock.
TIMES = ("_runtime", "_per_second", "_preparation_time", "step_time")
# ONNX Runtime's fused operators compute the same up to rounding.
ORT_TOLERANCE = 2e-4


@dataclass
class Outcome:
    """The results of a script.

    Attributes:
        logs: the log entries.
        weights: the trained model's state dict.
        extra: other values that must be equal.
        plans_on: number of enabled rows of the plan table; None without an engine.
        engine: the engine that trained in the end; empty without one.
    """

    logs: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    plans_on: int | None = None
    engine: str = ""


class Memopt:
    """Attaches an engine to a script's Trainer or model; does nothing for the baseline."""

    def __init__(self, engine: str, **options: Any) -> None:
        self._options = None if engine == "none" else ENGINES[engine] | options
        self._table: Callable[[], PlanTable | None] = lambda: None

    def attach(self, trainer: Trainer) -> None:
        if self._options is not None:
            attachment = attach(trainer, **self._options)
            self._table = lambda: attachment.table

    def optimize(self, model: torch.nn.Module) -> None:
        if self._options is not None:
            self._table = optimize(model, **self._options).plans

    def note(self, outcome: Outcome) -> Outcome:
        """Add the engine's name and number of enabled rows to `outcome`, and return it."""
        table = self._table()
        if table is not None:
            outcome.plans_on, outcome.engine = len(table.enabled), table.engine
        return outcome


Script = Callable[[Path, Memopt], Outcome]


@functools.lru_cache(maxsize=1)
def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per word of `WORDS`."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **special)


def bert_config(**changes: Any) -> BertConfig:
    """Returns a config with one layer of width 32 over `WORDS`, without dropout, since ONNX Runtime's masks differ."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, pad_token_id=1, **sizes, **still, **changes)


def sentence(source: random.Random) -> str:
    return " ".join(source.choices(WORDS[4:], k=source.randint(3, 9)))


def llama_config(**changes: Any) -> LlamaConfig:
    """Returns a config with one layer of width 32 over `WORDS`, with dropout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    others = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "attention_dropout": 0.1}
    return LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, **{**sizes, **others, **changes})


def arguments(kind: type, folder: Path, **changes: Any) -> Any:
    """Returns arguments for six quiet CPU steps; the large epsilon damps updates by gradients of rounding noise."""
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
    steps = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "adam_epsilon": 1e-3}
    return kind(output_dir=str(folder), **{**quiet, **steps, **changes})


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the log entries without values that depend on the clock."""
    return [{key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in entries]


def outcome(trainer: Trainer, **extra: Any) -> Outcome:
    """Returns the outcome of a Trainer after `train()`."""
    return Outcome(without_times(trainer.state.log_history), weights(trainer.model), extra)


def trained(trainer: Trainer, memopt: Memopt) -> Outcome:
    """Train a Trainer with the engine, and return the outcome."""
    memopt.attach(trainer)
    trainer.train()
    return outcome(trainer)


def run(script: Script, folder: Path, engine: str, **options: Any) -> Outcome:
    """Run `script` from a fixed seed, with an engine of `ENGINES` or with none."""
    set_seed(0)
    memopt = Memopt(engine, **options)
    try:
        return memopt.note(script(folder, memopt))
    finally:
        torch._dynamo.reset()


def check(script: Script, stock: Callable[[str, Script], Outcome], folder: Path, engine: str) -> None:
    """Check that the script trains under plans with the same outcome as without an engine, bitwise with compile."""
    ours = run(script, folder, engine)
    assert ours.plans_on
    assert_equal(ours, stock(script.__name__, script), 0.0 if engine == "compile" else ORT_TOLERANCE)


def assert_equal(ours: Outcome, stock: Outcome, tolerance: float = 0.0) -> None:
    """Check that logs (keys, values, order), weights and extras are equal, within `tolerance` or bitwise."""
    for part in ("logs", "weights", "extra"):
        _assert_close(getattr(ours, part), getattr(stock, part), tolerance, part)


def _assert_close(ours: Any, expected: Any, tolerance: float, place: str) -> None:
    """Compare numbers and tensors within `tolerance` and other values exactly; `place` is the path to the value."""
    if isinstance(expected, dict):
        assert list(ours) == list(expected), place
        for key, value in expected.items():
            _assert_close(ours[key], value, tolerance, f"{place}[{key!r}]")
    elif isinstance(expected, list):
        assert len(ours) == len(expected), f"{place}: {ours} against {expected}"
        for index, value in enumerate(expected):
            _assert_close(ours[index], value, tolerance, f"{place}[{index}]")
    elif isinstance(expected, torch.Tensor | float | numpy.ndarray):
        torch.testing.assert_close(
            torch.as_tensor(ours),
            torch.as_tensor(expected),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda line: f"{place}: {line}",
        )
    else:
        assert ours == expected, place
