"""Private names of accelerate: configured sharding and parallelism."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch


def fsdp_version(args: Any) -> int | None:
    """Returns the FSDP version that a Trainer's arguments or accelerate's launcher and config file request, or None.

    accelerate's launcher requests it in the environment, without the Trainer's argument (1.15,
    `utils/dataclasses.py`).
    """
    if args.fsdp:
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    return int(os.environ.get("FSDP_VERSION", "1"))


def parallelisms(args: Any) -> tuple[str, ...]:
    """Returns the kinds of parallelism (tensor, context, sequence) that a Trainer's arguments request, or accelerate's
    launcher in the environment (accelerate 1.15, `parallelism_config.py`)."""
    config = getattr(args, "parallelism_config", None)
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        config = importlib.import_module("accelerate").parallelism_config.ParallelismConfig()
    kinds = {"tensor": "tp", "context": "cp", "sequence": "sp"}
    return tuple(kind for kind, short in kinds.items() if getattr(config, f"{short}_enabled", False))


def leave_out_fsdp_checkpointing(trainer: Any) -> Callable[[], None] | None:
    """Disable `activation_checkpointing` of the FSDP config, so that accelerate wraps no layer for it (1.15).

    Returns:
        A function that undoes it; None if it was not enabled.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.activation_checkpointing:
        return None
    plugin.activation_checkpointing = False
    return lambda: setattr(plugin, "activation_checkpointing", True)


def final_norm(model: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the norm that accelerate shards together with the head (1.15); None if it finds none."""
    find = getattr(importlib.import_module("accelerate.utils.fsdp_utils"), "_find_final_norm", None)
    norm: torch.nn.Module | None = None if find is None else find(model)
    return norm
