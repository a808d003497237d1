"""Shows the plan table of the engine that holds the model, and at the end the claimed beside the measured."""

import os
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import Reporter, is_final
from optimum_memopt.engines.base import engine_of
from optimum_memopt.logs import LOG_LEVELS, get_logger, rank
from optimum_memopt.memory import MIB, PeakMonitor
from optimum_memopt.plans.table import PlanTable


class PlanStatsCallback(TrainerCallback):
    """Logs the plan table after the first step, again whenever the engine builds another graph, and a summary.

    On `devinfo` every rank also logs the engine's own insight into each node.

    Args:
        path: JSON-lines file to append a record of each plan to.

    Attributes:
        table: the latest table, None before the first step or without an engine.
        predicted_peak_mib: what the engine predicted for the largest step of the run, None before the run's end or
            where it does not predict.
    """

    def __init__(self, path: str | os.PathLike | None = None) -> None:
        self._reporter = Reporter("plan_stats", path)
        self._monitor: PeakMonitor | None = None
        self.table: PlanTable | None = None
        self.predicted_peak_mib: float | None = None

    @property
    def measured_peak_mib(self) -> float:
        """Peak of the run so far in MiB: resident on the CPU, allocated on CUDA; 0 before the run."""
        return self._monitor.run_peak if self._monitor else 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.table, self.predicted_peak_mib = None, None
        self._reporter.begin(state)
        self._monitor = PeakMonitor(args.device)
        self._monitor.start_run()
        if engine_of(kwargs["model"]) is None:
            self._reporter.lines("no engine holds this model, so there is no plan table; see optimum_memopt.attach")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        engine = engine_of(kwargs["model"])
        table = engine.plans() if engine else None
        if table is None or table is self.table:
            return
        self.table = table
        self._reporter.lines(table.to_text())
        if insight := engine.insight():
            get_logger().log(LOG_LEVELS["devinfo"], f"rank {rank()}: {insight}")
        self._reporter.metrics(
            {
                "plans/available": len(table.plans),
                "plans/on": len(table.enabled),
                "plans/claimed_saving_bytes": table.claimed_saving_bytes,
            }
        )
        for plan in table.plans:
            self._reporter.record(
                state.global_step - 1, engine=table.engine, symbols=dict(table.symbols), **asdict(plan)
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not is_final(logs):
            return
        # Frozen before it is reported, so that whoever asks later is told the same.
        self._monitor.end_run()
        if self.table is None:
            return
        measured, claimed = self.measured_peak_mib, self.table.claimed_saving_bytes / MIB
        device = "allocated" if args.device.type == "cuda" else f"resident, {self._monitor.method}"
        self._reporter.lines(
            f"measured peak of the run {measured:.1f} MiB ({device}); claimed saving of the "
            f"{len(self.table.enabled)} plans that are on {claimed:.1f} MiB, a sum over tensors of different moments"
        )
        metrics = {"run_peak_mib": measured}
        engine = engine_of(kwargs["model"])
        predicted = engine and engine.predicted_peak_mib(
            kwargs.get("optimizer"), accumulates=args.gradient_accumulation_steps > 1
        )
        if predicted:
            self.predicted_peak_mib = predicted
            self._reporter.lines(
                f"predicted {predicted:.1f} MiB, measured {measured:.1f} MiB ({measured / predicted:.1%}) at the peak"
            )
            metrics["predicted_peak_mib"] = predicted
        self._reporter.metrics(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._monitor is not None:
            self._monitor.end_run()
