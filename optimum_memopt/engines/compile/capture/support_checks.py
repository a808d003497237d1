"""Refuses, before training, what the compile engine cannot train or would train differently than asked."""

import os
from typing import TYPE_CHECKING

import torch

from optimum_memopt.engines.shared import in_place
from optimum_memopt.errors import MemOptError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import TrainingArguments


_SPLIT_BY_HOOKS = (
    "it gathers the parameters of each module in hooks, which are graph breaks, so that no plan reaches further than "
    "a module"
)


def check(model: torch.nn.Module) -> None:
    """Refuse what would be trained without the plan.

    Raises:
        UnsupportedModelError: no parameters, DataParallel.
    """
    in_place.check_parameters(model)
    if isinstance(model, torch.nn.DataParallel):
        raise UnsupportedModelError(
            "the compile engine under torch.nn.DataParallel: start one process for each GPU, for example with "
            "accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
        )


def check_arguments(args: "TrainingArguments") -> None:
    """Refuse Trainer arguments that do the engine's work too.

    Raises:
        MemOptError: torch_compile, FSDP, ZeRO 3, several GPUs in one process.
    """
    if args.torch_compile:
        raise MemOptError("--torch_compile with the compile engine, which compiles the model already; leave it out")
    # accelerate's launcher and config file ask for FSDP in the environment, without the Trainer's argument.
    if args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise MemOptError(f"FSDP with the compile engine: {_SPLIT_BY_HOOKS}; use DDP or ZeRO 0, 1, 2")
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise MemOptError(
            f"DeepSpeed ZeRO stage 3 with the compile engine: {_SPLIT_BY_HOOKS}; use ZeRO stage 0, 1 or 2 "
            "(`zero_optimization.stage`), with --memory_opt_level 1 if the step needs less memory"
        )
    if args.n_gpu > 1:
        raise MemOptError(
            f"the compile engine with {args.n_gpu} GPUs in one process: start one process for each GPU, for example "
            "with accelerate launch, or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
        )
