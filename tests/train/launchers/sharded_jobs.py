"""Trainings of models whose parameters ranks share, each beside that of a stock Trainer."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.train.launchers.worker import Job

LAYERS = {"llama": "LlamaDecoderLayer", "roberta-classification": "RobertaLayer", "mixtral": "MixtralDecoderLayer"}
DEPTH = 3
# A chain of layers so long that it is worth to cut it, and more tokens than a layer has columns.
SEGMENTS: dict[str, Any] = {
    "segments": True,
    "config": {"num_hidden_layers": 9},
    "rows": 160,
    "plan": {"memory_opt_budget": "90%"},
    "arguments": {"per_device_train_batch_size": 16},
}
SAVED = {"save_strategy": "steps", "save_steps": 2}


def compared(name: str, folder: Path, stock: dict[str, Any], ours: dict[str, Any], **fields: Any) -> Iterator[Job]:
    """A stock Trainer's job with these arguments, ours, and where checkpoints are saved ours resumed; where layers run
    in segments ours by the plan file, too.

    Args:
        fields: of all of them; `segments` of ours.
    """
    segments = fields.pop("segments", False)
    job = functools.partial(Job, **{"config": {"num_hidden_layers": DEPTH}, **fields})
    yield job(f"{name}-plain", "plain", arguments=stock)
    yield job(f"{name}-ours", "compile", arguments=ours, segments=segments)
    if segments:
        plan = {"memory_opt_plan": str(folder / f"{name}-ours.plan.json")}
        yield job(f"{name}-planned", "compile", arguments={**stock, **plan})
    if ours.get("save_steps"):
        resume = str(folder / f"{name}-ours-output" / "checkpoint-2")
        yield job(f"{name}-resumed", "compile", arguments=ours, resume=resume)


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
