"""No step of a steady run waits for the device; in plain PyTorch each step does, as transformers reads the mask."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.steps import SMALL, batch_of, build
from transformers import Trainer, TrainerCallback, TrainingArguments

import optimum_memopt
from optimum_memopt.engines.compile.train import host_watch
from tests.trainer_runs import log_lines

STEADY, STEPS = 4, 7
PLANS: dict[str, dict[str, Any]] = {
    "no plan": {},
    "level": {"memory_opt_level": 1},
    "layers": {"memory_opt_level": 1, "memory_opt_unit": "layer"},
    "chunked": {"memory_opt_level": 1, "memory_opt_loss": "chunked"},
    "chunked layers": {"memory_opt_level": 1, "memory_opt_loss": "chunked", "memory_opt_unit": "layer"},
    "offload": {"memory_opt_config": "Gelu+:3:-1"},
    "budget": {"memory_opt_budget": "1GiB"},
    "variants": {"memory_opt_budget": "1GiB", "memory_opt_variants": 2},
}
ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}


@pytest.fixture(autouse=True)
def _may_wait_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class NoWaits(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= STEADY:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def train(folder: Path, padding: int, options: dict[str, Any]) -> Trainer:
    batch = {name: tensor.cpu() for name, tensor in batch_of(SMALL).items()}
    batch["attention_mask"] = torch.ones(SMALL.batch, SMALL.length, dtype=torch.long)
    batch["attention_mask"][0, SMALL.length - padding :] = 0
    rows = [{name: tensor[at] for name, tensor in batch.items()} for at in range(SMALL.batch)] * (2 * STEPS)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=SMALL.batch, gradient_accumulation_steps=2, max_steps=STEPS,
        # Trainer reads the loss in each step to look for NaN.
        logging_nan_inf_filter=False, logging_strategy="no", save_strategy="no", report_to="none", bf16=True,
    )  # fmt: skip
    trainer = Trainer(build("roberta", SMALL, dropout=0.1), args, train_dataset=rows, callbacks=[NoWaits()])
    optimum_memopt.attach(trainer, **{**ENGINE, **options})
    trainer.train()
    assert trainer.state.global_step == STEPS
    return trainer


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("plan", PLANS)
def test_a_trainer(tmp_path: Path, plan: str, padding: int) -> None:
    table = train(tmp_path, padding, PLANS[plan]).memopt.table
    # The stand-in computes nothing: a mask that is read there marks padding.
    assert ("attention: flash" in table.header[0]) == (padding == 0)


@pytest.mark.parametrize("plan", ["no plan", "layers", "chunked", "chunked layers", "budget"])
def test_a_loop(plan: str) -> None:
    """A custom loop without a mask, usual without padding, never waits in steady steps."""
    model, batch = build("llama", SMALL), batch_of(SMALL)
    del batch["attention_mask"]
    memopt = optimum_memopt.optimize(model, **{**ENGINE, **PLANS[plan]})
    for step in range(STEPS):
        torch.cuda.set_sync_debug_mode("error" if step >= STEADY else "default")
        model(**batch).loss.backward()
    torch.cuda.set_sync_debug_mode("default")
    memopt.detach()


@pytest.mark.parametrize(("unit", "said"), [("auto", 1), ("layer", 0), ("model", 0)])
def test_a_device_that_waits_for_python_is_named(unit: str, said: int) -> None:
    """Here every kernel is fast; a choice of the unit is not commented on."""
    model, batch = build("llama", dataclasses.replace(SMALL, layers=4)), batch_of(SMALL)
    del batch["attention_mask"]
    with log_lines() as lines:
        memopt = optimum_memopt.optimize(model, **{**ENGINE, "memory_opt_unit": unit})
        for _ in range(20):
            model(**batch).loss.backward()
        memopt.detach()
    assert [host_watch.FASTER_AS_ONE_GRAPH in line for line in lines].count(True) == said


def test_released_gradients() -> None:
    model, batch = build("llama", SMALL), batch_of(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    plan = {**PLANS["layers"], "memory_opt_release_gradients": True}
    memopt = optimum_memopt.optimize(model, optimizer=optimizer, **{**ENGINE, **plan})
    for step in range(STEPS):
        torch.cuda.set_sync_debug_mode("error" if step >= STEADY else "default")
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    memopt.detach()


def test_a_mask_is_read_where_it_has_changed_since_it_was_moved() -> None:
    from accelerate import data_loader

    from optimum_memopt.engines.torch_compat import host_masks

    host_masks.watch_masks()
    batch = data_loader.send_to_device({"attention_mask": torch.ones(2, 4, dtype=torch.long)}, torch.device("cuda"))
    mask = batch["attention_mask"]
    torch.cuda.set_sync_debug_mode("error")
    assert host_masks.is_true(mask)
    mask[0, 3:] = 0
    with pytest.raises(RuntimeError, match="synchroniz"):
        host_masks.is_true(mask)
    host_masks.leave_masks()
