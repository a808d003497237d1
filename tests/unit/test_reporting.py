import gc
import json
import weakref

import pytest
from transformers import Trainer, TrainerState

from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from optimum_memopt.callbacks.reporting import check_log_steps, find_trainer, is_due, is_final, is_printed
from optimum_memopt.errors import MemOptError
from tests.trackers import Marker, Tracker


class Worker(Trainer):
    """A Trainer that believes to be another rank than 0."""

    def is_world_process_zero(self):
        return False


def test_schedule():
    assert [step for step in range(70) if is_due(step, 0)] == [*range(10), 16, 32, 64]
    assert [step for step in range(10) if is_due(step, 4)] == [0, 4, 8]
    assert all(is_due(step, 1) for step in range(20))
    assert [step for step in range(70) if is_due(step, 0) and is_printed(step, 0)] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert is_printed(12, 4)


def test_log_steps_below_zero_is_refused():
    assert check_log_steps(0) == 0
    with pytest.raises(MemOptError, match="-1"):
        check_log_steps(-1)
    with pytest.raises(MemOptError):
        MemoryPhasesCallback(log_steps=-1)
    with pytest.raises(MemOptError):
        InputDensityCallback(log_steps=-2)


def test_the_trainer_is_found_from_its_event(trainer_of):
    marker = Marker()
    trainer = trainer_of([marker])
    trainer.train()
    assert marker.trainer() is trainer


def test_without_a_trainer_the_error_says_so():
    with pytest.raises(MemOptError, match="transformers.Trainer"):
        find_trainer(TrainerState())


def test_records_are_appended_as_json_lines(trainer_of, tmp_path):
    path = tmp_path / "new" / "memopt.jsonl"
    for _ in range(2):
        trainer_of([Marker(path)]).train()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"step": step, "kind": "plan_stats", "marker": True} for step in (1, 2, 3)] * 2


def test_other_ranks_are_silent(trainer_of, tmp_path, capsys, monkeypatch):
    path, tracker = tmp_path / "memopt.jsonl", Tracker()
    monkeypatch.setenv("RANK", "1")
    callbacks = [tracker, Marker(path), MemoryPhasesCallback(path=path), InputDensityCallback(path=path)]
    trainer_of(callbacks, Worker).train()
    assert not path.exists()
    assert tracker.ours == []
    assert "[memopt]" not in capsys.readouterr().err


def test_the_last_logs_are_known():
    assert is_final({"train_runtime": 1.0, "train_loss": 1.0})
    assert not is_final({"loss": 1.0})
    assert not is_final(None)


def test_a_run_that_counts_its_tokens_is_not_over_at_its_first_log(trainer_of):
    """Trainer then puts `train_runtime` into every entry."""
    tracker = Tracker()
    callbacks = [tracker, MemoryPhasesCallback(), InputDensityCallback()]
    trainer_of(callbacks, logging_steps=1, include_num_input_tokens_seen="all").train()
    assert all("train_runtime" in entry for entry in tracker.trainers)
    assert [entry["step"] for entry in tracker.ours if "memopt/measured_peak_mib" in entry] == [3]
    assert [entry["memopt/run_total_tokens/labels"] for entry in tracker.ours[-2:] if len(entry) > 2] == [60]


def test_callbacks_do_not_keep_a_trainer_alive(trainer_of):
    callbacks = [Marker(), MemoryPhasesCallback(), InputDensityCallback()]
    trainer = trainer_of(callbacks)
    trainer.train()
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None
