"""The plan table is sent to the log, to the trackers and to the file."""

import json

import pytest
import torch
from transformers import TrainerCallback

from optimum_memopt import PlanStatsCallback, optimize, run_summary
from tests.trackers import Tracker, numbers, tracked
from tests.trainer_runs import build, collate, log_lines, make, rows, tables

NAME = "roberta-classification"
CONFIG = "Gelu+:1:-1"


def test_table_numbers_and_records(tmp_path):
    file = tmp_path / "deep" / "memopt.jsonl"
    trainer = tracked(make(tmp_path, NAME, memory_opt_config=CONFIG, memory_opt_log_file=str(file)))
    with log_lines() as lines:
        trainer.train()
    table = trainer.memopt.table
    assert tables(lines) == [table.to_text()]
    row = next(line for line in table.to_text().splitlines() if CONFIG in line and "ON" in line)
    assert row.split()[-2:] == ["-1", "1"], "requested and applied"

    assert numbers(trainer, "plans/available") == [len(table.plans)]
    assert numbers(trainer, "plans/on") == [1]
    # One Gelu output of (4 rows, 9 tokens, 24) floats.
    first = table.symbols["inputs_input_ids_dim0"] * table.symbols["inputs_input_ids_dim1"]
    assert numbers(trainer, "plans/claimed_saving_bytes") == [table.claimed_saving_bytes] == [first * 24 * 4]
    assert [e["step"] for e in numbers(trainer) if "memopt/plans/on" in e] == [1]

    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["config"] for record in records] == [plan.config for plan in table.plans]
    assert all(record["kind"] == "plan_stats" and record["step"] == 0 for record in records)
    gelu = next(record for record in records if record["config"] == CONFIG)
    assert (gelu["engine"], gelu["frequency"], gelu["requested_count"], gelu["applied_count"]) == ("ort", 1, -1, 1)
    assert gelu["symbols"] == dict(table.symbols)
    assert sum(record["applied_count"] for record in records) == 1


def test_the_end_sets_the_measured_beside_the_claimed(tmp_path):
    trainer = tracked(make(tmp_path, NAME, memory_opt_config=CONFIG))
    with log_lines() as lines:
        trainer.train()
    (summary,) = [line for line in lines if line.startswith("measured peak of the run")]
    claimed = trainer.memopt.table.claimed_saving_bytes / 2**20
    assert f"claimed saving of the 1 enabled plans {claimed:.1f} MiB" in summary
    (peak,) = numbers(trainer, "run_peak_mib")
    assert f"{peak:.1f} MiB (resident" in summary
    assert trainer.memopt.measured_peak_mib == pytest.approx(peak)
    assert 100 < peak < 100_000
    text = run_summary(trainer)
    assert f"{peak:.1f} MiB" in text and f"{CONFIG} (1 of 1)" in text


@pytest.mark.parametrize(("level", "shown"), [("warning", 0), ("info", 1), ("devinfo", 1)])
def test_log_levels(tmp_path, level, shown):
    trainer = tracked(make(tmp_path, NAME, memory_opt_log_level=level, max_steps=2))
    with log_lines() as lines:
        trainer.train()
    assert len(tables(lines)) == shown
    insights = [line for line in lines if line.startswith("rank 0: ")]
    assert len(insights) == (level == "devinfo")
    assert all("MemoryInsight Summary" in line and "Gelu+" in line for line in insights)
    assert numbers(trainer, "plans/available"), "trackers get the numbers on every level"


def test_a_new_graph_shows_a_new_table(tmp_path):
    """A new graph shows a new table, as when rows with token types follow rows without under ONNX Runtime."""
    plain_rows = rows(NAME, 8)
    typed_rows = [{**row, "token_type_ids": torch.zeros_like(row["input_ids"])} for row in rows(NAME, 8, seed=2)]

    def collate_typed(examples):
        batch = collate([{key: row[key] for key in row if key != "token_type_ids"} for row in examples])
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])
        return batch

    data = {"train_dataset": plain_rows + typed_rows, "data_collator": collate_typed}
    order = {"train_sampling_strategy": "sequential", "max_steps": 4}
    trainer = make(tmp_path, NAME, memory_opt_config=CONFIG, **data, **order)
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(trainer.memopt.table)

    trainer.add_callback(Watch())
    tracked(trainer)
    with log_lines() as lines:
        trainer.train()
    shown = tables(lines)
    assert len(shown) == 2
    assert [table is seen[0] for table in seen] == [True, True, False, False]
    assert [bool(table.enabled) for table in (seen[0], seen[-1])] == [True, True]
    assert [entry["step"] for entry in numbers(trainer) if "memopt/plans/on" in entry] == [1, 3]
    assert sum("the inputs changed" in line for line in lines) == 1


def test_alone_with_a_stock_trainer_and_no_engine(tmp_path):
    file = tmp_path / "memopt.jsonl"
    callback = PlanStatsCallback(file)
    trainer = make(tmp_path, NAME, plain=True, callbacks=[callback])
    assert callback.measured_peak_mib == 0
    with log_lines() as lines:
        trainer.train()
    assert [line for line in lines if "this model has no engine" in line] == lines
    assert callback.table is None and not file.read_text()
    assert callback.measured_peak_mib > 100


def test_alone_with_a_stock_trainer_on_a_model_that_has_an_engine(tmp_path):
    model = build(NAME)
    engine = optimize(model, memory_opt_config=CONFIG, ort_fallback=False)
    callback = PlanStatsCallback(tmp_path / "memopt.jsonl")
    trainer = make(tmp_path, NAME, plain=True, model=model, callbacks=[callback, Tracker()])
    with log_lines() as lines:
        trainer.train()
    assert callback.table is engine.plans() is not None
    assert tables(lines) == [callback.table.to_text()]
    assert numbers(trainer, "plans/on") == [1]
    assert (tmp_path / "memopt.jsonl").stat().st_size > 100


def test_the_users_own_callback_is_the_one_that_is_used(tmp_path):
    callback = PlanStatsCallback(tmp_path / "mine.jsonl")
    trainer = make(tmp_path, NAME, callbacks=[callback], max_steps=1)
    assert trainer.memopt.plan_stats is callback
    with log_lines() as lines:
        trainer.train()
    assert len(tables(lines)) == 1
    assert (tmp_path / "mine.jsonl").exists()
