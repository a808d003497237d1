"""A workload's step in plain PyTorch, with its optimizer, on fake tensors: the rows of `plan` without an engine."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from optimum_memopt.compat.torch import tensor_bytes, tensors_in
from optimum_memopt.engines.api.predictions import BATCH, OPTIMIZER, EagerSettings, StepTimeline, Workload
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.costs import times
from optimum_memopt.engines.compile.costs.costs import seconds_by_bound
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, build
from optimum_memopt.engines.simulator.allocator import AllocatorPeak, allocator_peak
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.simulator.live_run import FORWARD, OPTIMIZER_STEP, LiveRun
from optimum_memopt.engines.simulator.standins import eager_standin, multiprocessors
from optimum_memopt.engines.simulator.trainer_step import run_micro_batches
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.generators import preserved_generators
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.step_settings import StepSpec


@dataclass(frozen=True)
class PlainStep:
    """A predicted step of plain PyTorch.

    Attributes:
        run: the run of one micro-batch, or of two with gradient accumulation.
        states: bytes of each optimizer state.
        update: bytes of temporary tensors of the optimizer's step.
        other_batches: bytes of the other micro-batches of the step, which Trainer holds on the device, too.
        constant: bytes outside of tensors: of libraries on CUDA, of the process on a CPU.
        sizes: batch sizes by name.
        is_on_cuda: the step runs on CUDA, so torch's caching allocator can be predicted.
        seconds: estimated time of an optimizer step with all its micro-batches; None if no device is named.
    """

    run: LiveRun
    states: tuple[int, ...]
    update: int
    other_batches: int
    constant: int
    sizes: Mapping[str, int]
    is_on_cuda: bool
    seconds: float | None = None

    @cached_property
    def whole(self) -> LiveRun:
        """Returns the run with what Trainer holds around it, and the optimizer's step."""
        held = [Storage(f"state {n}", size, OPTIMIZER) for n, size in enumerate(self.states)]
        held += [Storage("other micro-batches", self.other_batches, BATCH)] if self.other_batches else []
        step = Event("optimizer step", "optimizer step", workspace=self.update)
        return replace(
            self.run,
            events=(Event("", allocates=tuple(held)), *self.run.events, step),
            phases=(FORWARD, *self.run.phases, OPTIMIZER_STEP),
            modules=("", *self.run.modules, ""),
        )

    @property
    def peak(self) -> int:
        """Returns the peak in bytes, with each tensor at its requested size."""
        return self.constant + self.whole.peak

    @property
    def timeline(self) -> StepTimeline:
        return self.whole.timeline(self.sizes, self.constant)

    @cached_property
    def allocator(self) -> AllocatorPeak | None:
        """Returns the peak of torch's allocator on CUDA; None on other devices."""
        if not self.is_on_cuda:
            return None
        given, events = self.run.split()
        always = [self.constant, *filter(None, [self.other_batches]), *(storage.bytes for storage in given)]
        return allocator_peak(always, events, self.states, self.update)


def plain_step(workload: Workload, spec: StepSpec, settings: EagerSettings) -> PlainStep:
    """Run a step of a workload in plain PyTorch; raises as `plain_steps`."""
    with plain_steps(workload, spec) as step:
        return step(settings)


@contextlib.contextmanager
def plain_steps(workload: Workload, spec: StepSpec) -> Iterator[Callable[[EagerSettings], PlainStep]]:
    """Yields a function that runs a step of a workload on fake tensors; their mode is active within the context.
    Activation checkpointing stays on for later steps.

    Raises:
        MemOptError: the device or optimizer is unknown, or the model cannot be built, reads values of its tensors, or
            fails.
    """
    planned = PlannedStep(workload, Selection(), spec)
    # Read outside of the fake mode: torch computes with real values.
    values = workload.values
    forked, quiet = preserved_generators(), warnings.catch_warnings()
    with forked, quiet, eager_standin(planned.target), dynamo.fake_tensors():
        # PEFT calls transformers' deprecated names (0.21).
        warnings.simplefilter("ignore", FutureWarning)
        model, batch = build(workload, planned.here)
        for name in values.keys() & batch.keys():
            fake_tensors.with_values(batch[name], values[name])
        yield partial(_plain_step, planned, model, batch)


def _plain_step(
    planned: PlannedStep, model: torch.nn.Module, batch: Mapping[str, Any], settings: EagerSettings
) -> PlainStep:
    here, target, spec = planned.here, planned.target, planned.spec
    count = 2 if spec.gradient_accumulation_steps > 1 else 1
    cuda, records_work = multiprocessors(target, here), target is not None
    run = run_micro_batches(model, batch, planned.autocast_dtype, settings, cuda, count, records_work=records_work)
    trained = [parameter for name, parameter in model.named_parameters() if name in run.trained]
    optimizer, seconds = planned.optimizer_of(model), None
    if target is not None:
        update = times.update_times(trained, optimizer, here, target)
        seconds = update.step(seconds_by_bound(run.calls, target), spec.gradient_accumulation_steps)
    return PlainStep(
        run,
        tuple(optimizer.state_sizes(trained)),
        optimizer.step_bytes(trained),
        (spec.gradient_accumulation_steps - 1) * tensor_bytes(tensors_in(batch)),
        target.libraries if target is not None else held_bytes(here),
        input_sizes(batch),
        planned.is_on_cuda,
        seconds,
    )
