"""Trainer holds all micro-batches of an optimizer step: runs and dry runs count them, and say if they do not fit."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_memopt import MemOptTrainer
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.sizes import Budget
from optimum_memopt.training.batches import run_of
from optimum_memopt.training.fake_run import dry_run
from tests.compiled import hold_still
from tests.model_zoo import SMALL
from tests.trainer_runs import make

OPTIONS = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "max_steps": 1}
ROWS, COUNT = 4, 200
ROW = {name: value[0] for name, value in SMALL.batch(1, 256).items()}
BATCH_BYTES = ROWS * sum(value.nbytes for value in ROW.values())


def trainer_of(folder: Path, count: int, **changes: Any) -> MemOptTrainer:
    return make(
        folder, "small", gradient_accumulation_steps=count, train_dataset=[ROW] * ROWS * COUNT, **OPTIONS, **changes
    )


def predicted_peak(trainer: MemOptTrainer) -> int:
    peaks = []
    with contextlib.ExitStack() as stack:
        suspend = trainer.memopt.engine.suspend
        stack.callback(suspend)
        trainer.memopt.engine.suspend = lambda: peaks.append(trainer.memopt.engine.predictor.footprint().peak)
        trainer.train()
    return peaks[0]


def test_a_run_counts_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)
    alone, many = (trainer_of(tmp_path / str(count), count) for count in (1, COUNT))
    grown = predicted_peak(many) - predicted_peak(alone)
    assert grown == pytest.approx((COUNT - 1) * BATCH_BYTES, rel=0.02)
    assert f"{COUNT} micro-batches" in many.memopt.table.header[2]


@pytest.mark.nightly
def test_a_budget_suggests_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_still(monkeypatch)
    peak = predicted_peak(trainer_of(tmp_path / "all", COUNT))
    budget = {"memory_opt_budget": f"{(peak - COUNT * BATCH_BYTES // 2) / 2**20:.6f}MiB"}
    with pytest.raises(DoesNotFitError) as refused:
        trainer_of(tmp_path / "over", COUNT, **budget).train()
    line = str(refused.value)
    assert f"Trainer holds all {COUNT} micro-batches of an optimizer step on the device" in line
    count = re.search(r"--gradient_accumulation_steps (\d+) fits", line)
    assert count is not None and 60 < int(count[1]) < COUNT
    trainer_of(tmp_path / "fits", int(count[1]), **budget).train()


def test_a_dry_run_counts_all_of_them(tmp_path: Path) -> None:
    found = {count: dry_run(trainer_of(tmp_path / str(count), count), "h100") for count in (2, COUNT)}
    forward = {
        count: next(phase.peak for phase in run.phases if phase.name == "forward") for count, run in found.items()
    }
    # CUDA's allocator rounds up to blocks.
    assert forward[COUNT] - forward[2] == pytest.approx((COUNT - 2) * BATCH_BYTES, rel=0.1)
    assert f"{COUNT} micro-batches" in found[COUNT].header
    limit = forward[COUNT] - COUNT * BATCH_BYTES // 2
    over = dry_run(trainer_of(tmp_path / "over", COUNT), "h100", Budget("some", limit))
    count = re.search(r"--gradient_accumulation_steps (\d+), because Trainer holds all 200", over.suggestions[0])
    assert count is not None and 1 < int(count[1]) < COUNT


@pytest.mark.parametrize(("rows", "held"), [(4 * COUNT, COUNT), (4 * 3 + 1, 4), (1, 1)])
def test_an_epoch_may_have_fewer(rows: int, held: int, tmp_path: Path) -> None:
    trainer = make(tmp_path, "small", gradient_accumulation_steps=COUNT, train_dataset=[ROW] * rows, **OPTIONS)
    assert run_of(trainer).micro_batches == held


def test_a_stream_has_any_number(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([ROW] * ROWS)

    trainer = make(tmp_path, "small", gradient_accumulation_steps=3, train_dataset=Stream(), **OPTIONS)
    assert run_of(trainer).micro_batches == 3
