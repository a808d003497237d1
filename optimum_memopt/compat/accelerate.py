"""Private names of accelerate: sharding and parallelism that are asked for, outputs under autocast."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch


def fsdp_version(args: Any) -> int | None:
    """The version of FSDP that a Trainer's arguments, or accelerate's launcher and config file, ask for; None: none.

    accelerate's launcher asks in the environment, without the Trainer's argument (1.15, `utils/dataclasses.py`).
    """
    if args.fsdp:
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    return int(os.environ.get("FSDP_VERSION", "1"))


def parallelisms(args: Any) -> tuple[str, ...]:
    """The kinds of parallelism, of tensor, context and sequence, that a Trainer's arguments or accelerate's launcher
    in the environment ask for (accelerate 1.15, `parallelism_config.py`)."""
    config = getattr(args, "parallelism_config", None)
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        config = importlib.import_module("accelerate").parallelism_config.ParallelismConfig()
    kinds = {"tensor": "tp", "context": "cp", "sequence": "sp"}
    return tuple(kind for kind, short in kinds.items() if getattr(config, f"{short}_enabled", False))


def leave_out_fsdp_checkpointing(trainer: Any) -> Callable[[], None] | None:
    """Have accelerate wrap no layer for activation checkpointing, as `activation_checkpointing` of an FSDP config asks
    for (1.15).

    Returns:
        What undoes it; None where no layer was to be wrapped.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.activation_checkpointing:
        return None
    plugin.activation_checkpointing = False
    return lambda: setattr(plugin, "activation_checkpointing", True)


def final_norm(model: torch.nn.Module) -> torch.nn.Module | None:
    """The norm that accelerate shards together with the head (1.15); None: it finds none."""
    find = getattr(importlib.import_module("accelerate.utils.fsdp_utils"), "_find_final_norm", None)
    norm: torch.nn.Module | None = None if find is None else find(model)
    return norm
