"""Runs under DeepSpeed, in a separate process since DeepSpeed's state stays in a process.

    deepspeed_runs.py zero|offload FOLDER

Writes the trained weights to `weights.pt` and the results to `found.json` in FOLDER.
"""

import json
import sys
from pathlib import Path

import torch

from optimum_memopt import MemOptError
from optimum_memopt.engines.ort import optimizers
from tests.deepspeed_kernels import leave_out_shared_memory
from tests.trainer_runs import log_lines, make, weights

NAME = "roberta-classification"
# No value is torch's default, so that an argument that is not passed on is noticed.
TRAINING = {
    "max_steps": 20,
    "learning_rate": 3e-3,
    "weight_decay": 0.3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-4,
    "warmup_steps": 5,
    "lr_scheduler_type": "cosine",
}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
}
OFFLOAD = {**ZERO, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
OWN = {**ZERO, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def refused_under(config, name, folder):
    try:
        make(folder, NAME, deepspeed=config, memory_opt_optim=name)
    except MemOptError as error:
        return str(error)
    return ""


def zero(folder):
    """Run each config in a Trainer, and apply FP16_Optimizer to the optimizer that ZeRO creates."""
    leave_out_shared_memory()
    unforced = {**OFFLOAD, "zero_force_ds_cpu_optimizer": False}
    found = {
        "own": refused_under(OWN, "torch_fused_adamw", folder),
        "offload": refused_under(OFFLOAD, "torch_fused_adamw", folder),
        "offload-fused": refused_under(OFFLOAD, "deepspeed_fused_adam", folder),
        "offload-unforced": refused_under(unforced, "torch_fused_adamw", folder),
        "offload-cpu": refused_under(OFFLOAD, "deepspeed_cpu_adam", folder),
    }
    trainer = make(
        folder, NAME, deepspeed=ZERO, memory_opt_optim="torch_fused_adamw", ort_fp16_optimizer=True, **TRAINING
    )
    with log_lines() as lines:
        trainer.train()
    torch.save(weights(trainer.model), folder / "weights.pt")
    optimizer = trainer.optimizer.optimizer
    before = dict(vars(optimizer))
    return found | {
        "lines": lines,
        "optimizer": f"{type(optimizer).__name__} {type(optimizer.optimizer).__name__} "
        f"{optimizer.optimizer.defaults['fused']}",
        "reason": optimizers.modify_fp16_optimizer(trainer.optimizer),
        "untouched": vars(optimizer) == before,
        "unknown": optimizers.modify_fp16_optimizer(torch.optim.AdamW(trainer.model.parameters())),
    }


def offload(folder):
    """Train with DeepSpeed's CPU Adam, which is built at its first use."""
    trainer = make(folder, NAME, deepspeed=OFFLOAD, memory_opt_optim="deepspeed_cpu_adam", **TRAINING)
    trainer.train()
    torch.save(weights(trainer.model), folder / "weights.pt")
    return {}


if __name__ == "__main__":
    run, target = {"zero": zero, "offload": offload}[sys.argv[1]], Path(sys.argv[2])
    (target / "found.json").write_text(json.dumps(run(target)))
    torch.distributed.destroy_process_group()
