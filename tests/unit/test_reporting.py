import gc
import json
import pickle
import resource
import types
import weakref

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import DVCLiveCallback, TensorBoardCallback
from transformers.trainer_callback import CallbackHandler

from optimum_memopt import InputDensityCallback, MemOptError, MemoryPhasesCallback, PlanStatsCallback, attach
from optimum_memopt.callbacks.reporting import JsonLines, find_trainer, is_due, is_final, is_printed, json_lines
from optimum_memopt.oom.guard import MemoryReportCallback
from tests.trackers import Marker, Tracker
from tests.trainer_runs import log_lines


class Worker(Trainer):
    """A Trainer that reports a rank other than 0."""

    def is_world_process_zero(self):
        return False


def test_schedule():
    assert [step for step in range(70) if is_due(step, 0)] == [*range(10), 16, 32, 64]
    assert [step for step in range(10) if is_due(step, 4)] == [0, 4, 8]
    assert all(is_due(step, 1) for step in range(20))
    assert [step for step in range(70) if is_due(step, 0) and is_printed(step, 0)] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert is_printed(12, 4)


def test_log_steps_below_zero_is_refused():
    with pytest.raises(MemOptError, match="-1"):
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


def test_other_ranks_are_silent(trainer_of, tmp_path, capsys):
    path, tracker = tmp_path / "memopt.jsonl", Tracker()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        callbacks = [tracker, Marker(path), MemoryPhasesCallback(path=path), InputDensityCallback(path=path)]
        trainer_of(callbacks, Worker).train()
    finally:
        torch.distributed.destroy_process_group()
    assert not path.exists()
    assert tracker.ours == []
    assert "[memopt]" not in capsys.readouterr().err


def test_the_last_logs_are_known():
    assert is_final({"train_runtime": 1.0, "train_loss": 1.0})
    assert not is_final({"loss": 1.0})
    assert not is_final(None)


def test_a_run_that_counts_its_tokens_is_not_over_at_its_first_log(trainer_of):
    """Callbacks finish only at the end, although Trainer then adds `train_runtime` to every log entry."""
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


KINDS = (MemoryReportCallback, MemoryPhasesCallback, InputDensityCallback)


class Raises(TrainerCallback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self._raise)
        self.hooks = 0

    def _raise(self, args, state, control, model, **kwargs) -> None:
        self.hooks = len(model._forward_pre_hooks) + len(model._forward_hooks)
        raise KeyboardInterrupt


def left_by(trainer) -> tuple[int, bool]:
    model = trainer.model
    return len(model._forward_pre_hooks) + len(model._forward_hooks), "training_step" in vars(trainer)


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_begin", "on_step_end", "on_epoch_end"])
def test_an_interrupted_stock_trainer_leaves_no_hook(trainer_of, event: str) -> None:
    raises = Raises(event)
    trainer = trainer_of([MemoryPhasesCallback(), InputDensityCallback(), raises])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert raises.hooks == 2 and left_by(trainer) == (0, False)
        pickle.dumps(trainer.model)


@pytest.mark.parametrize("kind", KINDS)
def test_each_callback_alone(trainer_of, kind: type) -> None:
    trainer = trainer_of([kind(), Raises("on_step_end")])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert left_by(trainer)[0] == 0


def test_a_callback_that_is_added_later_beside_one_of_the_constructor(trainer_of) -> None:
    trainer = trainer_of([InputDensityCallback()])
    trainer.add_callback(MemoryPhasesCallback())
    trainer.add_callback(Raises("on_step_end"))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert left_by(trainer) == (0, False)


def test_what_an_interrupted_run_left_goes_with_the_next(trainer_of) -> None:
    trainer, raises = trainer_of([]), Raises("on_step_end")
    for callback in (MemoryPhasesCallback(), raises):
        trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(raises)
    trainer.train()
    assert left_by(trainer) == (0, False)


def test_a_trainer_that_nobody_holds_trains(trainer_of) -> None:
    assert trainer_of([MemoryPhasesCallback()]).train().global_step == 3


UNWRITABLE = {
    "a folder": "",
    "under a file": "file/found.jsonl",
    "no place for files": "/proc/found.jsonl",
    "a name that is too long": 300 * "x",
    "a NUL": "found\0.jsonl",
}


@pytest.mark.parametrize("path", UNWRITABLE.values(), ids=UNWRITABLE.keys())
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path, path):
    (tmp_path / "file").touch()
    for kind in (PlanStatsCallback, InputDensityCallback, MemoryPhasesCallback):
        with pytest.raises(MemOptError, match="the log file .* cannot be written .*--memory_opt_log_file") as error:
            kind(path=f"{tmp_path}/{path}" if not path.startswith("/") else path)
        assert "\n" not in str(error.value)


def test_attach_refuses_it_and_leaves_the_trainer_as_it_was(trainer_of, tmp_path):
    trainer = trainer_of([])
    before = list(trainer.callback_handler.callbacks), dict(vars(trainer))
    with pytest.raises(MemOptError, match="the log file"):
        attach(trainer, memory_opt_engine="compile", log_memory_phases=True, memory_opt_log_file=str(tmp_path))
    assert (trainer.callback_handler.callbacks, dict(vars(trainer))) == before


def test_other_ranks_neither_create_nor_check_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    JsonLines(tmp_path / "new" / "found.jsonl")
    JsonLines(tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_leaves_no_half_line(tmp_path):
    """A full disk leaves no partial line, which would also lose the first record of a resumed run."""
    file, limits = JsonLines(tmp_path / "log.jsonl"), resource.getrlimit(resource.RLIMIT_FSIZE)
    file.append([{"step": 1}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with log_lines() as lines:
            file.append([{"step": 2}, {"step": 3}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len([line for line in lines if "stopped writing" in line]) == 1
    JsonLines(file.path).append([{"step": 4}])
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 4]


def test_a_full_disk_costs_the_log_and_says_so_once(trainer_of):
    path = "/dev/full"
    callbacks = [InputDensityCallback(path=path), MemoryPhasesCallback(path=path), Marker(path)]
    trainer = trainer_of(callbacks)
    with log_lines() as lines:
        trainer.train()
    assert trainer.state.global_step == 3
    assert [line for line in lines if "log file" in line] == [
        "stopped writing the log file /dev/full (No space left on device); training continues"
    ]


def test_a_file_that_goes_away_is_written_anew_and_its_folder_is_not(tmp_path):
    folder = tmp_path / "run"
    file = json_lines(folder / "found.jsonl")
    assert json_lines(folder / "found.jsonl") is file
    file.append([{"a": 1}, {"a": 2}])
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [{"a": 1}, {"a": 2}]
    file.path.unlink()
    file.append([{"a": 3}])
    assert json.loads(file.path.read_text()) == {"a": 3}
    file.path.unlink()
    folder.rmdir()
    with log_lines() as lines:
        for _ in range(2):
            file.append([{"a": 4}])
    assert len(lines) == 1 and "No such file or directory" in lines[0]


def test_changing_the_folder_does_not_move_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = json_lines("found.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.append([{"a": 1}])
    assert json.loads((tmp_path / "found.jsonl").read_text()) == {"a": 1}


def test_metrics_reach_trackers_alone(trainer_of, capsys):
    tracker = Tracker()
    trainer = trainer_of([tracker, Marker()], logging_steps=1)
    trainer.train()
    assert tracker.ours == [{"step": step, "memopt/marker": float(step)} for step in (1, 2, 3)]
    assert ["loss" in entry for entry in tracker.trainers] == [True] * 3 + [False]
    assert tracker.trainers == trainer.state.log_history, "on_log and the log's history hold what is not the Trainer's"
    output = capsys.readouterr()
    assert "marker line 2" in output.err
    assert "memopt/marker" not in output.out + output.err


def test_metrics_reach_subclasses_of_integrations_and_those_that_others_register(trainer_of, tmp_path, monkeypatch):
    class Board(TensorBoardCallback):
        seen = ()

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen = (*self.seen, *logs)
            control.should_training_stop = True
            return super().on_log(args, state, control, logs=logs, **kwargs)

    class Registered(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "memopt/marker" in logs:
                self.ours = {**kwargs, "logs": dict(logs)}
                logs.clear()

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "registered", Registered)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    board, registered, marker = Board(), Registered(), Marker()
    trainer = trainer_of([registered, board, marker], logging_steps=100)
    trainer.train()
    assert trainer.state.global_step == 3, "a tracker's view of the control is not the Trainer's"
    assert board.seen[:3] == ("memopt/marker",) * 3, "cleared by the tracker before"
    assert registered.ours["logs"] == {"memopt/marker": 3.0}
    assert registered.ours["model"] is trainer.model and registered.ours["optimizer"] is trainer.optimizer
    assert set(registered.ours) == {*_event_arguments(trainer), "logs"}


def _event_arguments(trainer):
    """Returns the arguments that Trainer itself passes to a callback with an event."""
    seen = {}
    handler = CallbackHandler([], trainer.model, trainer.processing_class, None, None)
    handler.add_callback(type("Spy", (TrainerCallback,), {"on_save": lambda *_, **kwargs: seen.update(kwargs)}))
    handler.on_save(trainer.args, trainer.state, trainer.control)
    return seen


def test_metrics_reach_tensorboard(trainer_of, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = trainer_of([InputDensityCallback(), MemoryPhasesCallback()], report_to="tensorboard")
    trainer.train()
    assert [sorted(entry)[-1] for entry in trainer.state.log_history] == ["train_steps_per_second"]
    files = list((tmp_path / "board").rglob("events.*"))
    assert len(files) == 1, "a number that came after the run was closed opened a new one"
    events = EventAccumulator(str(files[0]))
    events.Reload()
    assert [event.value for event in events.Scalars("train/memopt/density/input_ids")] == [100.0] * 3
    assert len(events.Scalars("train/memopt/measured_peak_mib")) == 1
    assert len(events.Scalars("train/epoch")) == 1, "the Trainer's own curves are what they are without ours"


def test_a_tracker_that_counts_its_own_steps_keeps_them(trainer_of):
    """DVCLive's steps stay its own; a stand-in does what its integration does, as it is not installed."""

    class Live(DVCLiveCallback):
        def __init__(self):
            self._initialized, self.live, self.curve = True, types.SimpleNamespace(step=0), []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.curve.append((self.live.step, "memopt/marker" in logs))
            self.live.step += 1

        def on_train_end(self, *args, **kwargs):
            pass

    live = Live()
    trainer_of([live, Marker()], logging_steps=1).train()
    assert [step for step, ours in live.curve if ours] == [1, 2, 3], "global steps"
    assert [step for step, ours in live.curve if not ours] == [0, 1, 2, 3], "as without our callbacks"
