"""A custom tracker that records the observers' numbers, and a minimal observer."""

import weakref
from typing import Any

from transformers import Trainer, TrainerCallback

from optimum_memopt.callbacks.reporting import Reporter


class Tracker(TrainerCallback):
    """Records our numbers from `on_memopt_log` and the Trainer's from `on_log`, each with its global step."""

    def __init__(self) -> None:
        self.ours: list[dict[str, Any]] = []
        self.trainers: list[dict[str, Any]] = []

    def on_memopt_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.ours.append({"step": state.global_step, **logs})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.trainers.append({"step": state.global_step, **logs})


def tracked(trainer: Trainer) -> Trainer:
    trainer.add_callback(Tracker())
    return trainer


def numbers(trainer: Trainer, name: str | None = None) -> list[Any]:
    """Returns all entries that the Trainer's Tracker got from us, or only number `name` (without prefix) of each."""
    (tracker,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, Tracker)]
    if name is None:
        return tracker.ours
    return [entry[f"memopt/{name}"] for entry in tracker.ours if f"memopt/{name}" in entry]


class Marker(TrainerCallback):
    """A minimal user of the Reporter: one line, one metric and one record per step."""

    def __init__(self, path=None):
        self.reporter = Reporter("plan_stats", path)
        self.trainer = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer = weakref.ref(self.reporter.begin(state))

    def on_step_end(self, args, state, control, **kwargs):
        self.reporter.lines(f"marker line {state.global_step}")
        self.reporter.metrics({"marker": state.global_step})
        self.reporter.records(state.global_step, [{"marker": True}])
