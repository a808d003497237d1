"""Logs the plan table of a model's engine, and finally the claimed saving and the measured peak."""

import os
import weakref
from dataclasses import asdict
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import Reporter, is_final
from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.logs import LOG_LEVELS, get_logger, rank
from optimum_memopt.memory import process
from optimum_memopt.memory.peak_monitor import PeakMonitor
from optimum_memopt.plans.table import PlanTable
from optimum_memopt.sizes import MIB

# The table that `optimize` has logged for each model, so that a callback does not log it again.
tables_shown: "weakref.WeakKeyDictionary[torch.nn.Module, PlanTable]" = weakref.WeakKeyDictionary()

# Steps after which the predicted peak is compared with the measured one: the optimizer's states exist from the first
# step on, so the second step is the first complete one.
_COMPARED_AFTER = 2


class PlanStatsCallback(TrainerCallback):
    """Logs the plan table after the first step, again whenever the engine builds another graph, and a summary.

    If the engine predicts the peak, logs prediction and measurement after two steps and at the end. On `devinfo` every
    rank also logs the engine's own insight into each node.

    Args:
        path: JSON-lines file to append a record of each plan to.

    Attributes:
        micro_batch: rows of a micro-batch on a process, and micro-batches of an optimizer step; zeros before a run.
        table: the latest table, None before the first step or without an engine.
        predicted_peak_mib: the engine's prediction for the largest step of the run, None before the end of the second
            step or if the engine does not predict.
    """

    def __init__(self, path: str | os.PathLike | None = None) -> None:
        self.reporter = Reporter("plan_stats", path)
        self._monitor: PeakMonitor | None = None
        self._is_checked, self._first_step = False, 0
        self.micro_batch = 0, 0
        # With several kinds of batches, their tables alternate.
        self._shown: list[PlanTable] = []
        self.table: PlanTable | None = None
        self.predicted_peak_mib: float | None = None

    @property
    def measured_peak_mib(self) -> float:
        """Returns the peak of the run so far in MiB: resident on the CPU, allocated on CUDA; 0 before the run."""
        return self._monitor.run_peak if self._monitor else 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.table, self.predicted_peak_mib, self._is_checked = None, None, False
        # A resumed run begins at a later step.
        self._first_step = state.global_step
        self.micro_batch = state.train_batch_size or args.per_device_train_batch_size, args.gradient_accumulation_steps
        self._shown.clear()
        self.reporter.begin(state)
        self._monitor = PeakMonitor(args.device)
        self._monitor.start_run()
        if engine_of(kwargs["model"]) is None:
            self.reporter.lines("this model has no engine, so there is no plan table; see optimum_memopt.attach")

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Check before the first optimizer step changes a weight.
        if not self._is_checked:
            self._is_checked = True
            if (engine := engine_of(kwargs["model"])) is not None:
                engine.check_used()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        engine = engine_of(kwargs["model"])
        if engine is None or (table := engine.plans()) is None:
            return
        if state.global_step == self._first_step + _COMPARED_AFTER:
            when = f"after {_COMPARED_AFTER} steps"
            self.reporter.metrics(self._compared(engine, args, kwargs.get("optimizer"), when))
        self.table = table
        if any(each is table for each in self._shown):
            return
        self._shown.append(table)
        if tables_shown.get(kwargs["model"]) is not table:
            self.reporter.lines(table.to_text())
        if insight := engine.insight():
            get_logger().log(LOG_LEVELS["devinfo"], f"rank {rank()}: {insight}")
        counts = {"plans/available": len(table.plans), "plans/on": len(table.enabled)}
        self.reporter.metrics({**counts, "plans/claimed_saving_bytes": table.claimed_saving_bytes})
        graph = {"engine": table.engine, "symbols": dict(table.symbols)}
        self.reporter.records(state.global_step - 1, [{**graph, **asdict(plan)} for plan in table.plans])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not is_final(kwargs.get("logs")) or self._monitor is None:
            return
        # Freeze the peak before it is reported, so that later readers get the same value.
        self._monitor.end_run()
        if self.table is None:
            return
        measured, claimed = self.measured_peak_mib, self.table.claimed_saving_bytes / MIB
        device = "allocated" if args.device.type == "cuda" else f"resident, {self._monitor.method}"
        self.reporter.lines(
            f"measured peak of the run {measured:.1f} MiB ({device}); claimed saving of the "
            f"{len(self.table.enabled)} enabled plans {claimed:.1f} MiB, summed over tensors not all alive at once"
        )
        engine = engine_of(kwargs["model"])
        compared = self._compared(engine, args, kwargs.get("optimizer"), "at the peak of the run") if engine else {}
        self.reporter.metrics({"run_peak_mib": measured, **compared})

    def _compared(
        self, engine: Engine, args: TrainingArguments, optimizer: torch.optim.Optimizer | None, when: str
    ) -> dict[str, float]:
        """Log predicted and measured peak, and return them as metrics; empty without a prediction."""
        predicted = engine.predicted_peak_mib(optimizer)
        if not predicted:
            return {}
        self.predicted_peak_mib, measured = predicted, self.measured_peak_mib
        without = "; DeepSpeed's partitions and buffers are not predicted" if args.deepspeed else ""
        if args.device.type == "cpu" and process.keeps_freed_memory():
            without += "; malloc keeps freed memory for the next step, since no plan reduces memory"
        share = measured / predicted
        self.reporter.lines(
            f"predicted {predicted:.1f} MiB, measured {measured:.1f} MiB ({share:.1%}) {when}{without}"
        )
        return {"predicted_peak_mib": predicted, "measured_of_predicted": share}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._monitor is not None:
            self._monitor.end_run()
