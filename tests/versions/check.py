"""Checks the package's features with the installed releases, in three minutes on two processors.

Needs no test extra: torch, transformers, accelerate, PEFT, and DeepSpeed if it is installed. `make test-versions`
runs it in an environment for each file in this folder.

    python -m tests.versions.check [--output cells.json]
"""

import argparse
import copy
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "1")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import pytest
import torch
import transformers
from allocations import allocated
from packaging.version import Version
from torch.distributed.fsdp import fully_shard

import optimum_memopt
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.torch_compat import releases
from optimum_memopt.sizes import Budget
from tests.compiled import hold_still
from tests.gradients import accumulate, assert_bitwise_same, assert_bitwise_same_step, assert_same, assert_same_step
from tests.model_zoo import ZOO

PACKAGES = ("torch", "transformers", "accelerate", "peft", "deepspeed")
LAYERS = 4
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
# Share of the measured bytes: predictions are exact except for the loss itself.
EXACT = 1e-3
SLACK = 256


def llama(**changes: Any) -> torch.nn.Module:
    return ZOO["llama"].build("sdpa", **GROUPED, num_hidden_layers=LAYERS, **changes)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": llama,
    "roberta-mlm": lambda: ZOO["roberta-mlm"].build(num_hidden_layers=LAYERS),
    "t5": lambda: ZOO["t5"].build(num_layers=LAYERS + 1, num_decoder_layers=LAYERS + 1),
    "deberta-v2-mlm": lambda: ZOO["deberta-v2-mlm"].build(num_hidden_layers=LAYERS),
}
TASKS = {
    "llama": "text-generation", "roberta-mlm": "fill-mask", "t5": "text2text-generation", "deberta-v2-mlm": "fill-mask"
}  # fmt: skip


# Before 2.10, graphs round SiLU differently than its kernel, as with `torch.compile(model)`.
ROUNDS_SILU = Version(torch.__version__) < Version("2.10")


def assert_equal_step(name: str, model: torch.nn.Module, plain: torch.nn.Module, *batches: Any) -> None:
    """Assert bitwise equal steps; equal up to rounding if T5 sums bias gradients in another order, or SiLU rounds."""
    if name == "t5" or (name == "llama" and ROUNDS_SILU):
        assert_same_step(model, plain, *batches)
    else:
        assert_bitwise_same_step(model, plain, *batches)


def optimized(model: torch.nn.Module, **options: Any) -> Any:
    return optimum_memopt.optimize(model, **{**ENGINE, "memory_opt_loss": "plain", **options})


def pairs(*names: str) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module, dict[str, torch.Tensor]]]:
    """Yields these models, or all, each with its copy and a batch."""
    for name in names or MODELS:
        model = MODELS[name]().train()
        yield name, model, copy.deepcopy(model), ZOO[name].batch(4, 20)


def assert_predicted(name: str, memopt: Any, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    for _ in range(3):
        # After these steps, values of frozen weights are no longer compared.
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)
    forward, saved, loss = allocated(lambda: model(**batch).loss)
    backward, _, _ = allocated(loss.backward)
    peak, found = max(forward, saved + backward), memopt.predictor.activations(memopt.predictor.sizes_of(batch))
    assert abs(found - peak) <= EXACT * peak + SLACK, (
        f"{name}: {found} of {peak} bytes are predicted: {memopt.plans().header[0]}"
    )


def modules() -> None:
    """Every module of the package can be imported: all private names exist."""
    left_out = ("optimum_memopt.engines.ort",)
    for module in pkgutil.walk_packages(optimum_memopt.__path__, "optimum_memopt."):
        if not module.name.startswith(left_out):
            importlib.import_module(module.name)


def patches() -> None:
    problems = [problem for patch in releases.PATCHES if (problem := patch.problem())]
    assert not problems, "; ".join(problems)


def levels() -> None:
    """No plan and level 1 compile by layer, keep gradients, and predict activations as the allocator counts them."""
    for options in ({}, {"memory_opt_level": 1}):
        for name, model, plain, batch in pairs():
            memopt = optimized(model, **options)
            assert_equal_step(name, model, plain, batch, ZOO[name].batch(3, 13, seed=1))
            header = memopt.plans().header[0]
            assert "equal layers share one" in header, f"{name} is not compiled by layers: {header}"
            assert_predicted(name, memopt, model, batch)
            memopt.detach()


def budget() -> None:
    """A budget of three quarters of the activations holds."""
    for name, model, plain, batch in pairs("llama"):
        with pytest.MonkeyPatch.context() as patch:
            # A process grows by more than these models take.
            hold_still(patch)
            memopt = optimized(model)
            model(**batch).loss.backward()
            free = memopt.predictor.footprint()
            memopt.detach()
            asked = Selection(budget=Budget("", free.peak - free.activations // 4))
            engine = CompileEngine(asked, "aot_eager", loss="plain")
            engine.attach(model)
            assert_equal_step(name, model, plain, batch)
            assert engine.predictor.footprint().peak <= asked.budget.bytes, name
            assert engine.plans().enabled, name
            assert_predicted(name, engine, model, batch)
            engine.detach()


def configs() -> None:
    """A row is recomputed, and offloaded, by its name."""
    for name, model, plain, batch in pairs("roberta-mlm", "deberta-v2-mlm"):
        memopt = optimized(model)
        model(**batch)
        row = next(row.config for row in memopt.plans().plans if row.config.endswith(":1:-1"))
        memopt.detach()
        for config in (row, row.replace(":1:-1", ":3:-1")):
            memopt = optimized(model, memory_opt_config=config)
            assert_equal_step(name, model, plain, batch)
            assert memopt.plans().enabled, f"{name} {config}"
            memopt.detach()


def chunked() -> None:
    """The loss is computed in chunks."""
    for name, model, plain, batch in pairs("llama", "t5"):
        memopt = optimized(model, memory_opt_loss="chunked")
        assert_same_step(model, plain, batch)
        assert "loss in chunks" in memopt.plans().header[0], name


def masks() -> None:
    """Batches without padding run without masks, also with shared key heads."""
    model, batch = llama().train(), ZOO["llama"].batch(4, 20)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    plain = copy.deepcopy(model)
    memopt = optimized(model, memory_opt_level=1)
    assert_equal_step("llama", model, plain, batch)
    memopt.detach()
    # On CUDA, flash attention takes no mask.
    shape = {"batch_size": 4, "seq_len": 20, "padding": False}
    plan = optimum_memopt.plan(model.config, TASKS["llama"], device="a100", dtype="bfloat16", level=1, **shape)
    assert plan.table.header[0].endswith("attention: flash"), plan.table.header[0]


def simulated() -> None:
    """Plain PyTorch runs on tensors without data, here and for a planned device."""
    for name, model, _, batch in pairs():
        for device in (None, "t4"):

            def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
                model(**batch).loss.backward()

            found = optimum_memopt.simulate(step, model, batch, device=device)
            assert found.peak > 0, name


def planned() -> None:
    """`plan` works for an absent GPU: grouped queries in half precision and in float32, without padding."""
    for name in ("llama", "deberta-v2-mlm"):
        for dtype in ("float32", "bfloat16"):
            shape = {"batch_size": 4, "seq_len": 20, "padding": False}
            plan = optimum_memopt.plan(MODELS[name]().config, TASKS[name], device="a100", dtype=dtype, **shape)
            assert plan.peak > 0, name


def trainer() -> None:
    """Accumulation, a checkpoint, and a run resumed from it give the stock Trainer's weights."""
    rows = [{key: value[0] for key, value in ZOO["roberta-mlm"].batch(1, 12, seed=seed).items()} for seed in range(16)]
    with tempfile.TemporaryDirectory() as folder:

        def train(name: str, resume: str | None = None, **options: Any) -> dict[str, torch.Tensor]:
            args = transformers.TrainingArguments(
                f"{folder}/{name}", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
                save_steps=2, report_to="none", disable_tqdm=True, logging_strategy="no", use_cpu=True,
            )  # fmt: skip
            transformers.set_seed(0)
            trainer = transformers.Trainer(model=MODELS["roberta-mlm"](), args=args, train_dataset=rows)
            if options:
                optimum_memopt.attach(trainer, **{**ENGINE, "memory_opt_loss": "plain", **options})
            trainer.train(resume_from_checkpoint=resume)
            # Otherwise plain PyTorch has trained it.
            assert not options or trainer.memopt.table.enabled
            return trainer.model.state_dict()

        stock, ours = train("stock"), train("ours", memory_opt_level=1)
        again = train("again", f"{folder}/ours/checkpoint-2", memory_opt_level=1)
        for name, weight in stock.items():
            assert torch.equal(ours[name], weight) and torch.equal(again[name], weight), name


def _sharded_rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    models = [llama().train() for _ in range(2)]
    for model in models:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    plain, model = models
    memopt = optimized(model, memory_opt_level=1)
    batch = ZOO["llama"].batch(2, 12, seed=rank)
    steps = [accumulate(each, [batch]) for each in (model, plain)]
    local = [
        (losses, {name: gradient.to_local() for name, gradient in gradients.items()}) for losses, gradients in steps
    ]
    compare = assert_same if ROUNDS_SILU else assert_bitwise_same
    compare(*local)
    assert "fully_shard on 2 ranks" in memopt.plans().header[0] or "FSDP2" in memopt.plans().header[0]
    torch.distributed.destroy_process_group()


def fsdp2() -> None:
    """Level 1 trains under FSDP2 on two ranks with gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_sharded_rank, (f"{folder}/store",), nprocs=2)


class _Linear(torch.autograd.Function):
    """A linear function that writes to its result, like DeepSpeed's linear layer."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        result = given.matmul(weight.t())
        result += bias
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (gradient,), (given, weight) = gradients, ctx.saved_tensors
        return gradient.matmul(weight), gradient.flatten(0, 1).t().matmul(given.flatten(0, 1)), gradient.sum((0, 1))


class _WithFunctions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, given: torch.Tensor) -> transformers.utils.ModelOutput:
        for linear in self.linear:
            given = torch.nn.functional.gelu(_Linear.apply(given, linear.weight, linear.bias))
        return transformers.modeling_outputs.CausalLMOutput(loss=given.square().mean())


def functions() -> None:
    """A model with its own `autograd.Function` trains."""
    for options in ({}, {"memory_opt_level": 1}):
        model = _WithFunctions()
        plain = copy.deepcopy(model)
        optimized(model, **options)
        assert_bitwise_same_step(model, plain, {"given": torch.randn(4, 6, 8)})


def zero3() -> None:
    """ZeRO 3 trains on two ranks with gloo, launched by torchrun."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("no DeepSpeed")
    from tests.train.launchers.test_zero3 import compare

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        # With this variable, accelerate disables DeepSpeed.
        patch.delenv("ACCELERATE_USE_CPU", raising=False)
        compare("torchrun", Path(folder), "config")


CHECKS = (
    modules,
    patches,
    levels,
    budget,
    configs,
    chunked,
    masks,
    functions,
    simulated,
    planned,
    trainer,
    fsdp2,
    zero3,
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The result of a check: `ok`, or the reason why it failed."""

    check: str
    result: str
    seconds: float


def run(check: Callable[[], None]) -> Cell:
    started, result = time.monotonic(), "ok"
    try:
        check()
    except pytest.skip.Exception as skipped:
        result = f"left out: {skipped}"
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        result = f"{type(error).__name__}: {lines[0] if lines else ''}"
    return Cell(check.__name__, result, time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a file for the cells, as JSON")
    parser.add_argument("checks", nargs="*", help="these alone")
    asked = parser.parse_args()
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "-"
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    torch.set_num_threads(1)
    checks = [check for check in CHECKS if not asked.checks or check.__name__ in asked.checks]
    cells = []
    # Forked, because imports take as long as a check.
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), get_context("fork")) as pool:
        for cell in pool.map(run, checks):
            cells.append(cell)
            print(f"{cell.check:12} {cell.seconds:6.1f} s  {cell.result}", flush=True)
    if asked.output is not None:
        asked.output.write_text(json.dumps({"versions": versions, "cells": list(map(dataclasses.asdict, cells))}))
    sys.exit(any(not cell.result.startswith(("ok", "left out")) for cell in cells))


if __name__ == "__main__":
    main()
