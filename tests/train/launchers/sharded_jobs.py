"""Jobs that train sharded models, each with the job of a stock Trainer to compare with."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.train.launchers.worker import Job

LAYERS = {"llama": "LlamaDecoderLayer", "roberta-classification": "RobertaLayer", "mixtral": "MixtralDecoderLayer"}
DEPTH = 3
# A chain of layers long enough for segments to pay off, and more tokens than a layer has columns.
SEGMENTS: dict[str, Any] = {
    "segments": True,
    "config": {"num_hidden_layers": 9},
    "rows": 160,
    "plan": {"memory_opt_budget": "90%"},
    "arguments": {"per_device_train_batch_size": 16},
}
SAVED = {"save_strategy": "steps", "save_steps": 2}


def compared(name: str, folder: Path, stock: dict[str, Any], ours: dict[str, Any], **fields: Any) -> Iterator[Job]:
    """Yields a stock Trainer's job and the engine's; also one that resumes if checkpoints are saved, and one with the
    saved plan file if layers run in segments.

    Args:
        name: prefix of the jobs' names.
        folder: where the jobs run.
        stock: arguments of the stock Trainer.
        ours: arguments of the Trainer with the engine.
        fields: fields of all jobs, except `segments`, which is set only for the engine's.
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
