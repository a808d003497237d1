"""Random steps that really run out of memory train under the same limit with the first recommended flags."""

import json
import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser, Trainer

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments, MemoryReportCallback
from optimum_memopt.errors import is_out_of_memory
from tests.limited_memory import data_bytes, in_fresh_process, limit_data
from tests.rotation import in_turn, nightly
from tests.trainer_runs import CASES as MODELS
from tests.trainer_runs import build, collate

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="limits a process's data")]

NAMES = ("small", "gpt2", "llama", "roberta-mlm", "bert-classification", "albert-mlm", "opt")
NAMES += ("distilbert-classification",)


@dataclass(frozen=True)
class Case:
    """A step that runs out of memory.

    Attributes:
        name: name of the model.
        rows: rows of the batch.
        share: available memory, as a share of the step's.
        is_plain: whether a stock Trainer with only the callback trains, instead of the compile engine without a plan.
    """

    name: str
    rows: int
    share: float
    is_plain: bool

    def __str__(self) -> str:
        return f"{self.name}-{self.rows}-{self.share}-{'plain' if self.is_plain else 'engine'}"


def random_case(seed: int) -> Case:
    source = random.Random(seed)
    name = "small" if seed < 5 else source.choice(NAMES)
    rows = source.choice((12_288, 16_384, 20_480) if name == "small" else (3072, 4096, 6144))
    return Case(name, rows, round(source.uniform(0.4, 0.9), 2), source.random() < 0.5)


def train(case: Case, folder: Path, flags: list[str], limit: int | None) -> None:
    """Run one or two optimizer steps; writes their peak to a file, or exits with 3 if memory runs out."""
    torch.set_num_threads(1)
    given = {
        "--per_device_train_batch_size": str(case.rows),
        "--memory_opt_engine": "compile",
        "--memory_opt_compiler": "aot_eager",
        **dict(zip(flags[::2], flags[1::2], strict=True)),
    }
    quiet = "--use_cpu true --report_to none --save_strategy no --disable_tqdm true --max_steps 2"
    command = [*quiet.split(), "--output_dir", str(folder), *(part for pair in given.items() for part in pair)]
    (args,) = HfArgumentParser(MemOptTrainingArguments).parse_args_into_dataclasses(command)
    row = MODELS[case.name].batch(1, 48)
    data = [{key: value[0] for key, value in row.items()}] * (2 * case.rows)
    is_plain = case.is_plain and not any(flag.startswith("--memory_opt") for flag in flags)
    callbacks = [MemoryReportCallback()] if is_plain else []
    kind = Trainer if is_plain else MemOptTrainer
    trainer = kind(build(case.name), args, train_dataset=data, data_collator=collate, callbacks=callbacks)
    before, most = data_bytes(), [0]
    done = threading.Event()
    if limit is not None:
        limit_data(limit)
    threading.Thread(target=watch, args=(most, done), daemon=True).start()
    try:
        trainer.train()
    except (RuntimeError, MemoryError) as error:
        assert is_out_of_memory(error), repr(error)
        sys.exit(3)
    done.set()
    (folder / "taken").write_text(str(most[0] - before))


def watch(most: list[int], done: threading.Event) -> None:
    while not done.wait(0.002):
        most[0] = max(most[0], data_bytes())


@in_turn
@pytest.mark.parametrize("case", nightly(map(random_case, range(20)), but=[random_case(0)]), ids=str)
def test_the_first_recommended_flags_train(tmp_path, case):
    assert in_fresh_process(train, case, tmp_path, [], None) == 0
    # With ample memory the engine lets malloc keep freed blocks, so the peak is measured under a limit.
    scarce = int(1.1 * int((tmp_path / "taken").read_text()))
    assert in_fresh_process(train, case, tmp_path, [], scarce) == 0
    limit = int(case.share * int((tmp_path / "taken").read_text()))
    assert in_fresh_process(train, case, tmp_path, [], limit) == 3
    report = json.loads((tmp_path / "memory_report.json").read_text())
    assert 0.95 <= report["accounted"] <= 1.05
    flags = report["suggestions"][0]["flags"].split()
    assert in_fresh_process(train, case, tmp_path, flags, limit) == 0, report["suggestions"]
