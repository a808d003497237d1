"""The process of a rank in the launchers' tests: runs a list of jobs, and writes files with their results.

    worker.py JOBS.json

JOBS.json is a list of objects with the fields of `Job`. In the same folder the process writes for each job
`NAME.RANK.json` (the result of `train`) and `NAME.RANK.safetensors` (the trained weights). The exit code is 2 after a
refusal.
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import save, save_file
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, set_seed
from transformers.distributed import DistributedConfig

from optimum_memopt import MemOptError, MemOptOptions, attach
from optimum_memopt.compat.torch import of_all_ranks
from optimum_memopt.engines.shared.optimizers import OPTIMIZERS as OWN_OPTIMIZERS
from optimum_memopt.logs import rank
from tests.compiled import below_recompute
from tests.deepspeed_kernels import leave_out_shared_memory
from tests.limited_memory import RunsOut
from tests.model_zoo import IGNORE
from tests.train.launchers.accelerators import cpus_as_accelerators
from tests.train.trainers.harness import tokenizer
from tests.trainer_runs import ROWS, arguments, build, collate, log_lines, make, rows, weights

# A value of Trainer's --optim, or a class that Trainer does not support.
OPTIMIZERS = {
    "adamw_torch": "adamw_torch",
    "torch_fused_adamw": "adamw_torch_fused",
    "deepspeed_fused_adam": ("deepspeed.ops.adam", "FusedAdam"),
    "deepspeed_cpu_adam": ("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
}
_OPTIONS = {option.name for option in fields(MemOptOptions)}


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        name: name of the job and of its files.
        engine: `ort`, `compile`, or `plain` for a stock Trainer.
        model: name of the model.
        optimizer: a key of `OPTIMIZERS`.
        rows: number of rows in the data.
        arguments: arguments of the TrainingArguments.
        rank_arguments: further arguments, by rank.
        environment: environment variables, by rank.
        resume: the checkpoint to resume from.
        killed: (rank, step): the rank kills itself with SIGKILL before the step.
        count_reductions: whether to count how often DDP averages gradients.
        runs_out: numbers of the forwards that run out of memory, by rank.
        batches: the kinds of each rank's batches, in order, the last one repeated; see `Batches`.
        unread: whether the lengths of the rows are unknown before training.
        config: changes to the model's config.
        adapters: modules whose adapters are trained, and nothing else; empty to train the model itself.
        sharded_from_start: whether transformers builds the model under DeepSpeed's `zero.Init`.
        distributed: fields of the `DistributedConfig` with which transformers shards the model while loading it.
        sft: whether TRL's SFTTrainer trains.
        segments: whether the budget on rank 0 is slightly below the peak of recompute inside layers; its plan is saved
            to a file.
    """

    name: str
    engine: str = "ort"
    model: str = "small"
    optimizer: str = "adamw_torch"
    rows: int = ROWS
    arguments: dict[str, Any] = field(default_factory=dict)
    rank_arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, dict[str, str]] = field(default_factory=dict)
    resume: str | None = None
    killed: tuple[int, int] | None = None
    count_reductions: bool = False
    runs_out: dict[str, list[int]] | None = None
    batches: dict[str, list[str]] | None = None
    unread: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    adapters: list[str] = field(default_factory=list)
    sharded_from_start: bool = False
    distributed: dict[str, Any] = field(default_factory=dict)
    sft: bool = False
    segments: bool = False


class Batches:
    """A collator that makes batches of the given kinds in order: `padded`, `whole` (rows cut to the shortest), `long`
    (cut and repeated), `unlabelled` (no token has a label), `maskless` (no attention mask)."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = iter(kinds)
        self.kind = ""

    def __call__(self, examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        self.kind = next(self.kinds, self.kind)
        if self.kind != "padded":
            shortest = min(len(row["input_ids"]) for row in examples)
            examples = [{name: value[:shortest] for name, value in row.items()} for row in examples]
        batch = collate(examples)
        if self.kind == "long":
            batch = {name: value.repeat(1, 2) for name, value in batch.items()}
        if self.kind == "unlabelled":
            batch["labels"] = torch.full_like(batch["labels"], IGNORE)
        if self.kind == "maskless":
            del batch["attention_mask"]
        return batch


@dataclass(frozen=True)
class Unread(torch.utils.data.Dataset):
    """A dataset whose rows seem to be computed when they are read, so that their lengths are unknown."""

    rows: list[dict[str, torch.Tensor]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Killed(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Reductions(TrainerCallback):
    """Counts the gradient buckets that DDP has averaged by the end of each backward."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.count = 0
        self.after_backward: list[int] = []

    def on_train_begin(self, args, state, control, **kwargs):
        def count(process_group, bucket):
            self.count += 1
            return allreduce_hook(process_group, bucket)

        self.trainer.model_wrapped.register_comm_hook(None, count)

    def on_substep_end(self, args, state, control, **kwargs):
        self.after_backward.append(self.count)

    on_pre_optimizer_step = on_substep_end


class Exchanges(TrainerCallback):
    """Counts the objects that this rank has exchanged with the others by the end of each step."""

    def __init__(self) -> None:
        self.count = 0
        self.after_step: list[int] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.after_step.append(self.count)

    def counted(self) -> contextlib.AbstractContextManager:
        own = torch.distributed.all_gather_object

        def count(*args, **kwargs):
            self.count += 1
            return own(*args, **kwargs)

        return mock.patch.object(torch.distributed, "all_gather_object", count)


def optimizer_arguments(name: str, engine: str) -> dict[str, Any]:
    """Returns a Trainer's arguments for an optimizer: the engine's option, or those of a stock Trainer."""
    found = OPTIMIZERS[name]
    if engine != "plain" and name in OWN_OPTIMIZERS:
        return {"memory_opt_optim": name}
    if isinstance(found, str):
        return {"optim": found}
    kind = getattr(importlib.import_module(found[0]), found[1])
    return {"optimizer_cls_and_kwargs": (kind, {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0})}


@contextlib.contextmanager
def saved(model: torch.nn.Module) -> Iterator[str]:
    """Yields a folder with a saved transformers model; rank 0's folder is used on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        folder = of_all_ranks(own)[0]
        model.save_pretrained(folder)
        torch.distributed.barrier()
        yield folder
        torch.distributed.barrier()


def model_of(job: Job) -> torch.nn.Module:
    model = build(job.model, **job.config)
    if job.sharded_from_start:
        model = type(model)._from_config(model.config)
    if job.distributed:
        with saved(model) as folder:
            model = type(model).from_pretrained(folder, distributed_config=DistributedConfig(**job.distributed))
    if job.adapters:
        peft = importlib.import_module("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=job.adapters, r=4, init_lora_weights=False, lora_dropout=0.0)
        )
        if job.engine == "plain":
            # A Trainer with activation checkpointing does the same; DeepSpeed needs it, too.
            model.enable_input_require_grads()
    return model.train()


def sft_trainer(job: Job, folder: Path, changes: dict[str, Any]) -> Trainer:
    trl = importlib.import_module("trl")
    own = {name: changes.pop(name) for name in [*changes] if name in _OPTIONS}
    # A Trainer with a model_init does the same.
    set_seed(0)
    texts = [{"input_ids": row["input_ids"].tolist()} for row in rows(job.model, job.rows)]
    # The arguments come before the model: they make transformers use `zero.Init`.
    args = arguments(trl.SFTConfig, folder, **{"bf16": False, "gradient_checkpointing": False, **changes})
    trainer = trl.SFTTrainer(
        model=model_of(job),
        args=args,
        train_dataset=importlib.import_module("datasets").Dataset.from_list(texts),
        processing_class=tokenizer(),
    )
    if own:
        attach(trainer, **{"memory_opt_compiler": "aot_eager", **own})
    return trainer


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns the full weights, gathered from all ranks."""
    if type(trainer.model_wrapped).__name__ != "DeepSpeedEngine":
        found = weights(trainer.model)
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}
    gathered = importlib.import_module("deepspeed").zero.GatheredParameters
    with gathered(list(trainer.model.parameters())):
        return weights(trainer.model)


def train(job: Job, folder: Path) -> dict[str, Any]:
    """Train, and return this rank's results for the tests: world, optimizer, log, plan table, or the error."""
    own, reductions, exchanges = str(rank()), Reductions(), Exchanges()
    callbacks = [exchanges, *([reductions] if job.count_reductions else [])]
    if job.killed and job.killed[0] == rank():
        callbacks.append(Killed(job.killed[1]))
    engine = {} if job.engine == "plain" else {"memory_opt_engine": job.engine}
    optimizer = optimizer_arguments(job.optimizer, job.engine)
    changes = {**engine, **optimizer, **job.arguments, **job.rank_arguments.get(own, {})}
    trainer, kind = None, None
    if job.runs_out is not None:
        fails = dict.fromkeys(job.runs_out.get(own, []), "forward")
        kind = functools.partial(RunsOut, fails=fails, held=lambda trainer: 2**40)
    is_sharded = "fsdp" in job.arguments
    if is_sharded:
        AcceleratorState._reset_state(True)
    with (
        log_lines() as lines,
        mock.patch.dict(os.environ, job.environment.get(own, {})),
        cpus_as_accelerators() if is_sharded else contextlib.nullcontext(),
        below_recompute() if job.segments and rank() == 0 else contextlib.nullcontext(),
        exchanges.counted(),
    ):
        try:
            output = folder / f"{job.name}-output"
            if job.sft:
                trainer = sft_trainer(job, output, changes)
            else:
                changes |= {"train_dataset": rows(job.model, job.rows), "callbacks": callbacks, "trainer": kind}
                if job.unread:
                    changes["train_dataset"] = Unread(changes["train_dataset"])
                if job.batches is not None:
                    changes["data_collator"] = Batches(job.batches[own])
                if job.config or job.adapters or job.sharded_from_start or job.distributed:
                    changes["model_init"] = functools.partial(model_of, job)
                trainer = make(output, job.model, plain=job.engine == "plain", **changes)
            reductions.trainer = trainer
            trainer.train(resume_from_checkpoint=job.resume)
        except MemOptError as error:
            print(f"error: {error}", file=sys.stderr)
            return {"error": str(error), "steps": trainer.state.global_step if trainer else 0}
    if job.segments and rank() == 0:
        trainer.memopt.save_plan(folder / f"{job.name}.plan.json")
    # This gathers, so all ranks must take part.
    after = whole_weights(trainer)
    save_file(after, folder / f"{job.name}.{own}.safetensors")
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    table = None if job.engine == "plain" else trainer.memopt.table
    return {
        "world_size": trainer.args.world_size,
        "wrapped": type(trainer.model_wrapped).__name__,
        "optimizer": type(optimizer).__name__,
        "fused": bool(optimizer.param_groups[0].get("fused")),
        "digest": hashlib.sha256(save(after)).hexdigest(),
        "steps": trainer.state.global_step,
        "reductions": reductions.after_backward,
        "exchanges": exchanges.after_step,
        "lines": lines,
        "table": json.loads(table.to_json()) if table else None,
    }


def main() -> None:
    # DeepSpeed's launcher inserts --local_rank before it.
    path = Path(sys.argv[-1])
    if "WITHOUT_SHARED_MEMORY" in os.environ:
        leave_out_shared_memory()
    refused = False
    for content in json.loads(path.read_text()):
        job = Job(**content)
        # Same as in `tests/conftest.py`.
        gc.collect()
        gc.freeze()
        found = train(job, path.parent)
        refused |= "error" in found
        (path.parent / f"{job.name}.{rank()}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    # torch 2.13's gloo sometimes aborts while the interpreter shuts down, even with a stock Trainer; all results are
    # written by now.
    os._exit(2 if refused else 0)


if __name__ == "__main__":
    main()
