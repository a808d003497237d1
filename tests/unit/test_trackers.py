import types

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.integrations.integration_utils import DVCLiveCallback, TensorBoardCallback
from transformers.trainer_callback import CallbackHandler

from optimum_memopt.callbacks.input_density import InputDensityCallback
from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
from tests.trackers import Marker, Tracker


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
    """The arguments that Trainer itself gives a callback with an event."""
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
    """DVCLive is not installed: its place is held by what the integration does with it."""

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
