"""Builds a Trainer, plain or with an engine, on a tiny model of the zoo; shared by the trainer tests."""

import contextlib
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments
from optimum_memopt.logs import get_logger
from tests.model_zoo import IGNORE, PAD, SMALL, ZOO

# Largest distance between weights of runs that are equal except for rounding.
CLOSE = 1e-5
ROWS = 18
_FILL = {"input_ids": PAD, "attention_mask": 0, "labels": IGNORE}


CASES = {**ZOO, "small": SMALL}


def build(name: str, **changes: Any) -> torch.nn.Module:
    """Returns a one-layer model of the zoo with nonzero biases: the gradient of an attention key's bias is rounding
    noise, which would be all that a zero bias ever receives. `test_matrix.py` and `engines/` test plans over several
    layers."""
    model = CASES[name].build(**{**CASES[name].one_layer, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rows(name: str, count: int = ROWS, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Returns examples of lengths 5 to 9."""
    made = [CASES[name].batch(1, 5 + index % 5, seed=1000 * seed + index) for index in range(count)]
    return [{key: value[0] for key, value in row.items()} for row in made]


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {}
    for key in examples[0]:
        values = [example[key] for example in examples]
        if values[0].dim() == 1:
            batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=_FILL[key])
        else:
            batch[key] = torch.stack(values)
    return batch


def arguments(kind: type[TrainingArguments], folder: Path | str, **changes: Any) -> Any:
    """Returns arguments for five quiet steps of AdamW on the CPU. Epsilon is large because the usual one scales
    gradients of rounding noise up to a full step; fallback is off because it would pass every comparison with plain
    PyTorch."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
    }
    if kind is MemOptTrainingArguments:
        # Inductor would take most of a test's time; it has tests of its own, as ZeRO has.
        is_compiled = changes.get("memory_opt_engine", "ort") == "compile"
        defaults |= {"memory_opt_compiler": "aot_eager"} if is_compiled else {"ort_fallback": False}
        defaults |= {"memory_opt_engine": "ort"}
    return kind(str(folder), **{**defaults, **changes})


def make(
    folder: Path | str, name: str, plain: bool = False, trainer: type[Trainer] | None = None, **changes: Any
) -> Any:
    """Returns a trainer on the model `name`; `changes` that are Trainer arguments go to the Trainer, the rest to its
    TrainingArguments."""
    own = {key: changes.pop(key) for key in tuple(changes) if key in _TRAINER_ARGUMENTS}
    if "model" not in own and "model_init" not in own:
        own["model"] = build(name)
    own = {"train_dataset": rows(name), "eval_dataset": rows(name, 6, seed=1), "data_collator": collate} | own
    kind = trainer or (Trainer if plain else MemOptTrainer)
    return kind(args=arguments(TrainingArguments if plain else MemOptTrainingArguments, folder, **changes), **own)


_TRAINER_ARGUMENTS = frozenset(inspect.signature(Trainer).parameters)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference in any tensor, relative to its largest element; keys must be equal."""
    assert found.keys() == expected.keys()
    differences = [
        ((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12)).item()
        for name, tensor in expected.items()
        if tensor.is_floating_point()
    ]
    return max(differences)


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the package's log lines (its logger does not propagate) without progress lines of slow machines."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: not record.getMessage().startswith("still "))
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = get_logger()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def tables(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("Memory plans of the ")]
