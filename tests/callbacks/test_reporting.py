import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from optimum_memopt.callbacks.reporting import Reporter, check_log_steps, find_trainer, is_due, is_final
from optimum_memopt.errors import MemOptError


class Marker(TrainerCallback):
    """A minimal user of the Reporter: one line, one metric and one record a step."""

    def __init__(self, path=None):
        self.reporter = Reporter("plan_stats", path)
        self.trainer = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer = weakref.ref(self.reporter.begin(state))

    def on_step_end(self, args, state, control, **kwargs):
        self.reporter.lines(f"marker line {state.global_step}")
        self.reporter.metrics({"marker": state.global_step})
        self.reporter.record(state.global_step, marker=True)


class Collector(TrainerCallback):
    """Stands where a tracker does: before the user's callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))


class Worker(Trainer):
    """A Trainer that believes to be another rank than 0."""

    def is_world_process_zero(self):
        return False


@pytest.fixture
def trainer_of(tmp_path):
    def build(callbacks, trainer_class=Trainer, **arguments):
        torch.manual_seed(0)
        config = RobertaConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=20,
        )
        ids = torch.randint(3, 50, (8, 10))
        arguments = {"report_to": "none", "max_steps": 3, "save_strategy": "no", **arguments}
        return trainer_class(
            model=RobertaForMaskedLM(config),
            args=TrainingArguments(str(tmp_path / "run"), use_cpu=True, per_device_train_batch_size=2, **arguments),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            callbacks=callbacks,
        )

    return build


def test_schedule():
    assert [step for step in range(70) if is_due(step, 0)] == [*range(10), 16, 32, 64]
    assert [step for step in range(10) if is_due(step, 4)] == [0, 4, 8]
    assert all(is_due(step, 1) for step in range(20))


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


def test_metrics_reach_trackers_and_leave_the_trainers_own_log_alone(trainer_of, capsys):
    collector = Collector()
    trainer = trainer_of([collector, Marker()], logging_steps=1)
    trainer.train()
    markers = [(step, logs["memopt/marker"]) for step, logs in collector.logs if "memopt/marker" in logs]
    assert markers == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [step for step, logs in collector.logs if "loss" in logs] == [1, 2, 3]
    assert sum("memopt/marker" in logs for logs in trainer.state.log_history) == 3
    output = capsys.readouterr()
    assert "marker line 2" in output.err
    assert "memopt/marker" not in output.out + output.err, "the console got the numbers twice"
    assert "'loss'" in output.out + output.err


def test_metrics_reach_tensorboard(trainer_of, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer_of([InputDensityCallback(), MemoryPhasesCallback()], report_to="tensorboard").train()
    files = list((tmp_path / "board").rglob("events.*"))
    assert len(files) == 1, "a number that came after the run was closed opened a new one"
    events = EventAccumulator(str(files[0]))
    events.Reload()
    assert [event.value for event in events.Scalars("train/memopt/density/input_ids")] == [100.0] * 3
    assert len(events.Scalars("train/memopt/measured_peak_mib")) == 1


def test_records_are_appended_as_json_lines(trainer_of, tmp_path):
    path = tmp_path / "new" / "memopt.jsonl"
    for _ in range(2):
        trainer_of([Marker(path)]).train()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"step": step, "kind": "plan_stats", "marker": True} for step in (1, 2, 3)] * 2


def test_other_ranks_are_silent(trainer_of, tmp_path, capsys):
    path, collector = tmp_path / "memopt.jsonl", Collector()
    callbacks = [collector, Marker(path), MemoryPhasesCallback(path=path), InputDensityCallback(path=path)]
    trainer_of(callbacks, Worker).train()
    assert not path.exists()
    assert not any(name.startswith("memopt/") for _, logs in collector.logs for name in logs)
    assert "[memopt]" not in capsys.readouterr().err


def test_the_last_logs_are_known():
    assert is_final({"train_runtime": 1.0})
    assert not is_final({"loss": 1.0})
    assert not is_final(None)


def test_callbacks_do_not_keep_a_trainer_alive(trainer_of):
    callbacks = [Marker(), MemoryPhasesCallback(), InputDensityCallback()]
    trainer = trainer_of(callbacks)
    trainer.train()
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def test_importing_the_callbacks_imports_no_engine():
    code = (
        "import sys, optimum_memopt.callbacks.memory_phases, optimum_memopt.callbacks.input_density;"
        "print(sorted({'onnxruntime', 'deepspeed'} & {name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
