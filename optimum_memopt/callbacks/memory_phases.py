"""Reports memory at the boundaries of forward, backward and the optimizer's step, and the peak in between."""

import dataclasses
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
from optimum_memopt.callbacks.reporting import StepCallback, callback_of, is_final
from optimum_memopt.compat.torch import at_end_of_backward, tensors_in
from optimum_memopt.copies import add_hook
from optimum_memopt.engines.api.predictions import Phase
from optimum_memopt.memory.peak_monitor import CpuMemory, CudaMemory, PeakMonitor, held, merged, peak
from optimum_memopt.sizes import MIB


def format_line(step: int, phase: str, reading: CpuMemory | CudaMemory, method: str) -> str:
    """Returns one phase as a line in the format of ONNX Runtime's observer, MiB; on the CPU with the peak's method."""
    values = dataclasses.asdict(reading).items()
    cells = "".join(f" | {name.replace('_', ' ')}: {value:.0f}" for name, value in values)
    suffix = f" ({method})" if isinstance(reading, CpuMemory) else ""
    return f"rank-0 step {step} memory (MiB) | phase: {phase}{cells}{suffix}"


def format_table(step: int, readings: Mapping[str, CpuMemory | CudaMemory], method: str) -> str:
    """Returns all phases of a step as a table, MiB; on the CPU with the peak's method."""
    values = {phase: dataclasses.asdict(reading) for phase, reading in readings.items()}
    names = [name.replace("_", " ") for name in next(iter(values.values()))]
    kind = f", {method}" if "resident" in names else ""
    rows = [[f"step {step} (MiB{kind})", *names]]
    rows += [[phase, *(f"{value:.0f}" for value in row.values())] for phase, row in values.items()]
    width = max(len(row[0]) for row in rows)
    lines = [row[0].ljust(width) + "".join(cell.rjust(15) for cell in row[1:]) for row in rows]
    return "\n".join(["memory phases", *lines])


@dataclass(frozen=True)
class MeasuredStep:
    """The phases of one step, and the number of optimizer steps up to and including it."""

    step: int
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases)


class MemoryPhasesCallback(StepCallback):
    """Logs memory at `pre_forward`, `post_forward`, `pre_backward`, `post_backward` and `post_optimizer_step`.

    Each row shows the memory held at that moment and the peak since the previous phase, in MiB. On CUDA these are
    allocated, cached and inactive memory of torch's allocator; on the CPU resident memory. With gradient accumulation
    a row shows the last micro-batch, and peaks are the maximum over the micro-batches. Steps count from 0, as in ONNX
    Runtime; trackers get the Trainer's own `global_step`.

    The file and the trackers get all reported steps. The log shows a table for some of them (`is_printed`), and on
    `devinfo` a line of ONNX Runtime's observer for each phase of every reported step.

    Other steps cost nothing and still count in the run's exact peak, since the high-water mark is not reset. A
    reported step reads and clears the mark at most six times per micro-batch.

    Works with plain models and with any engine that keeps the model object, since it only hooks that object and its
    outputs. On CUDA it resets torch's peak statistics on reported steps: use `measured_peak_mib` in place of
    `torch.cuda.max_memory_allocated()`.

    Args:
        log_steps: report every N steps; 0 reports steps 0-9 of the run and then steps at powers of two.
        path: JSON-lines file to append the same numbers to.

    Attributes:
        highest_step: the measured step of the run with the highest peak; the first step, which compiles, only if
            there is no other.
    """

    def __init__(self, log_steps: int = 0, path: str | os.PathLike | None = None) -> None:
        super().__init__("memory_phases", log_steps, path)
        self._monitor: PeakMonitor | None = None
        self._readings: dict[str, CpuMemory | CudaMemory] = {}
        self.highest_step: MeasuredStep | None = None
        # Peak, phase and step of the phase with the highest peak among the reported steps.
        self._highest: tuple[float, str, int] | None = None
        self._in_backward = False

    @property
    def measured_peak_mib(self) -> float | None:
        """Returns the peak of the run so far (frozen when it ends): resident on the CPU, allocated on CUDA, in MiB."""
        return None if self._monitor is None else self._monitor.run_peak

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._highest = self.highest_step = None
        self._install_hooks(kwargs["model"])
        self._monitor = PeakMonitor(args.device)
        self._monitor.start_run()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, **kwargs)
        self._readings = {}
        if self._due and self._monitor is not None:
            self._monitor.start_phase()

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._observe("post_optimizer_step")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self._due or self._monitor is None:
            return
        self._due = False
        step, method = state.global_step - 1, self._monitor.method
        for phase, reading in self._readings.items():
            if self._highest is None or peak(reading) > self._highest[0]:
                self._highest = (peak(reading), phase, step)
        self._keep_highest(state.global_step)
        values = {phase: dataclasses.asdict(reading) for phase, reading in self._readings.items()}
        rows = [{"phase": phase, "unit": "MiB", "method": method, **row} for phase, row in values.items()]
        self.reporter.records(step, rows)
        self.reporter.metrics(
            {f"{phase}/{name}_mib": size for phase, row in values.items() for name, size in row.items()}
        )
        if self._readings and self._is_printed(step):
            self.reporter.lines(format_table(step, self._readings, method))
        for phase, reading in self._readings.items():
            self.reporter.lines(format_line(step, phase, reading, method), "devinfo")

    def _keep_highest(self, step: int) -> None:
        phases = [
            Phase(name, round(held(each) * MIB), round(peak(each) * MIB)) for name, each in self._readings.items()
        ]
        latest, kept = MeasuredStep(step, tuple(phases)), self.highest_step
        if phases and (kept is None or kept.step == self._first_step + 1 or latest.peak > kept.peak):
            self.highest_step = latest

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not is_final(kwargs.get("logs")) or self._monitor is None:
            return
        self._monitor.end_run()
        run_peak, method = self._monitor.run_peak, self._monitor.method
        what = f"allocated on {args.device}" if args.device.type == "cuda" else f"resident in this process ({method})"
        parts = [] if self._is_peak_shown() else [f"measured peak of the run: {run_peak:.0f} MiB {what}"]
        if self._highest is not None:
            highest, phase, step = self._highest
            parts.append(f"highest measured phase: up to {phase} of step {step}, {highest:.0f} MiB")
        if parts:
            self.reporter.lines("; ".join(parts))
        row = {"phase": "run", "unit": "MiB", "method": method, "measured_peak": run_peak}
        self.reporter.records(state.global_step, [row])
        self.reporter.metrics({"measured_peak_mib": run_peak})

    def _is_peak_shown(self) -> bool:
        """True if another callback shows the peak of the run, together with the plans' saving."""
        trainer = self.reporter.trainer
        plan_stats = callback_of(trainer, PlanStatsCallback) if trainer is not None else None
        return plan_stats is not None and plan_stats.table is not None

    def _observe(self, phase: str) -> None:
        if self._due and self._monitor is not None:
            self._readings[phase] = merged(self._readings.get(phase), self._monitor.start_phase())

    def _install_hooks(self, model: torch.nn.Module) -> None:
        # The hooks check which module calls them, since a shallow copy of the model may share them. The reference to
        # the model is weak, as dynamo may keep functions under `torch.compiler.disable` alive. They are disabled for
        # the compiler, since a compiled model must not trace them.
        hooked = weakref.ref(model)

        def observed(module: torch.nn.Module) -> bool:
            return self._due and module is hooked() and torch.is_grad_enabled()

        @torch.compiler.disable
        def before_forward(module: torch.nn.Module, inputs: Any) -> None:
            if observed(module):
                self._in_backward = False
                self._observe("pre_forward")

        @torch.compiler.disable
        def after_forward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            if observed(module):
                self._observe("post_forward")
                for tensor in tensors_in(outputs):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda gradient: self._begin_backward())

        self._hooks.callback(add_hook(model, "forward_pre", before_forward))
        self._hooks.callback(add_hook(model, "forward", after_forward))

    def _begin_backward(self) -> None:
        # Every output that the loss depends on calls this; the first call is the start of the backward.
        if not self._in_backward:
            self._in_backward = True
            self._observe("pre_backward")
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._observe("post_backward")
