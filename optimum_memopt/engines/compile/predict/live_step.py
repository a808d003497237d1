"""Runs a training step without an engine on fake tensors: Trainer's step, or any step of the user. The device need not
be present, and no weights are loaded."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from accelerate.utils.operations import convert_to_fp32

from optimum_memopt.compat.bitsandbytes import named_buffers
from optimum_memopt.compat.transformers import checkpoint_layers, is_mask
from optimum_memopt.engines.api.predictions import (
    BATCH,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    EagerSettings,
    SimulatedStep,
    StepTimeline,
    Workload,
)
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.compile.capture.standins import eager_standin, multiprocessors, stand_in_place
from optimum_memopt.engines.compile.costs import times
from optimum_memopt.engines.compile.costs.costs import seconds_by_bound
from optimum_memopt.engines.compile.costs.devices import Device, device_of
from optimum_memopt.engines.compile.graph.symbols import input_sizes
from optimum_memopt.engines.compile.memory.allocator import AllocatorPeak, allocator_peak
from optimum_memopt.engines.compile.memory.events import Event, Storage
from optimum_memopt.engines.compile.memory.live import (
    BACKWARD,
    FORWARD,
    OPTIMIZER_STEP,
    LiveRecorder,
    LiveRun,
    loss_of,
)
from optimum_memopt.engines.compile.predict.planned_step import PlannedStep, build
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors, kernels
from optimum_memopt.engines.torch_compat.compiler_errors import line_with_place, place_of
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.engines.torch_compat.trace_fixes import one_at_a_time
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.generators import preserved_generators
from optimum_memopt.memory.capacity import Capacity, capacity, capacity_of
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.step_settings import StepSpec


@dataclass(frozen=True)
class LiveStep:
    """A predicted step of plain PyTorch.

    Attributes:
        run: the run of one micro-batch, or of two with gradient accumulation.
        states: bytes of each optimizer state.
        update: bytes of temporary tensors of the optimizer's step.
        constant: bytes outside of tensors: of libraries on CUDA, of the process on a CPU.
        sizes: batch sizes by name.
        is_on_cuda: the step runs on CUDA, so torch's caching allocator can be predicted.
        seconds: estimated time of an optimizer step with all its micro-batches; None if no device is named.
    """

    run: LiveRun
    states: tuple[int, ...]
    update: int
    constant: int
    sizes: Mapping[str, int]
    is_on_cuda: bool
    seconds: float | None = None

    @cached_property
    def whole(self) -> LiveRun:
        """Returns the run with the optimizer states and the optimizer's step."""
        states = (Storage(f"state {n}", size, OPTIMIZER) for n, size in enumerate(self.states))
        step = Event("optimizer step", "optimizer step", workspace=self.update)
        return replace(
            self.run,
            events=(Event("", allocates=tuple(states)), *self.run.events, step),
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
        always = [self.constant, *(storage.bytes for storage in given)]
        return allocator_peak(always, events, self.states, self.update)


def plain_step(workload: Workload, spec: StepSpec, settings: EagerSettings) -> LiveStep:
    """Run a step of a workload in plain PyTorch; raises as `plain_steps`."""
    with plain_steps(workload, spec) as step:
        return step(settings)


@contextlib.contextmanager
def plain_steps(workload: Workload, spec: StepSpec) -> Iterator[Callable[[EagerSettings], LiveStep]]:
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
) -> LiveStep:
    here, target, spec = planned.here, planned.target, planned.spec
    count = 2 if spec.gradient_accumulation_steps > 1 else 1
    cuda, records_work = multiprocessors(target, here), target is not None
    run = run_micro_batches(model, batch, planned.autocast_dtype, settings, cuda, count, records_work=records_work)
    trained = [parameter for name, parameter in model.named_parameters() if name in run.trained]
    optimizer, seconds = planned.optimizer_of(model), None
    if target is not None:
        update = times.update_times(trained, optimizer, here, target)
        seconds = update.step(seconds_by_bound(run.calls, target), spec.gradient_accumulation_steps)
    return LiveStep(
        run,
        tuple(optimizer.state_sizes(trained)),
        optimizer.step_bytes(trained),
        target.libraries if target is not None else held_bytes(here),
        input_sizes(batch),
        planned.is_on_cuda,
        seconds,
    )


def run_micro_batches(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    autocast: torch.dtype | None,
    settings: EagerSettings,
    cuda: Multiprocessors | None,
    count: int = 1,
    *,
    args: Sequence[Any] = (),
    accumulated: Collection[str] = (),
    inspect_at: int = -1,
    records_work: bool = False,
) -> LiveRun:
    """Run forward and backward of a model on fake tensors as Trainer does; the caller has entered their mode.

    Args:
        batch: keyword arguments of the forward; `args` are the positional ones.
        accumulated: names of the parameters that have gradients of earlier micro-batches.
        inspect_at: see `LiveRecorder`.
        records_work: record the calls of the first micro-batch in `LiveRun.calls`.

    Raises:
        MemOptError: the model reads values of its tensors, or fails.
    """
    device = next(model.parameters()).device.type
    if settings.checkpoints:
        checkpoint_layers(model, settings.checkpoints)
    for name, value in batch.items():
        if is_mask(name) and isinstance(value, torch.Tensor):
            fake_tensors.with_mask(value, has_padding=True)
    recorder = LiveRecorder(model, cuda, inspect_at)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.empty_like(parameter) if name in accumulated else None
    try:
        with fake_tensors.run_as_eager(), recorder:
            recorder.hold(PARAMETERS, dict(itertools.chain(model.named_parameters(), named_buffers(model))))
            recorder.hold(BATCH, {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            recorder.hold(GRADIENTS, gradients)
            del gradients
            for place in range(count):
                recorder.records_work = records_work and not place
                recorder.begin(FORWARD)
                holds_cache = settings.keeps_outputs and not settings.checkpoints
                inputs = dict(batch) if holds_cache else without_key_value_cache(model, args, batch)
                with torch.autocast(device, autocast, enabled=autocast is not None):
                    outputs = model(*args, **inputs)
                if autocast is not None:
                    # As accelerate's `ConvertOutputsToFp32` (1.15, `utils/operations.py`).
                    outputs = convert_to_fp32(outputs)
                recorder.outputs("outputs", outputs)
                loss = loss_of(outputs)
                recorder.begin(FORWARD)
                if not settings.keeps_outputs:
                    outputs = None
                recorder.begin(BACKWARD)
                loss.backward()
                del outputs, loss
    except MemOptError:
        raise
    except Exception as error:
        raise MemOptError(
            f"{type(model).__name__} cannot be run on tensors without data ({line_with_place(error)})"
        ) from error
    return recorder.run()


def simulator(device: str | None) -> contextlib.AbstractContextManager["FakeSimulator"]:
    """Returns a context in which tensors have no data.

    Raises:
        MemOptError: the device is unknown.
    """
    return _simulator(None if device is None else device_of(device))


@contextlib.contextmanager
def _simulator(target: Device | None) -> Iterator["FakeSimulator"]:
    mode = fake_tensors.mode_without_pointers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time)
        stack.enter_context(preserved_generators())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(eager_standin(target))
        stack.enter_context(fake_tensors.run_as_eager())
        stack.enter_context(mode)
        held = target.libraries if target is not None else held_bytes(stand_in_place(None))
        yield FakeSimulator(target, mode, stack, [held])


@dataclass(frozen=True)
class FakeSimulator:
    """Runs steps on fake tensors.

    Attributes:
        _held: bytes of the process, then, as negative numbers, bytes of its tensors that were replaced by fake ones.
        _recorders: the recorder of the running step.
    """

    _target: Device | None
    _mode: dynamo.FakeTensorMode
    _stack: contextlib.ExitStack
    _held: list[int]
    _recorders: list[LiveRecorder] = field(default_factory=list)

    @property
    def memory(self) -> Capacity:
        return capacity(self._here) if self._target is None else capacity_of(self._target.memory)

    @property
    def shares_host(self) -> bool:
        return self._target is None and self._here.type == "cpu"

    @property
    def constant(self) -> int:
        return max(0, sum(self._held))

    def copy(self, value: Any) -> Any:
        try:
            return fake_tensors.fake_copy(value, self._mode, self._here.type, keeps_values=True)
        # Copying an arbitrary user object may raise anything.
        except Exception as error:
            name = "an argument" if isinstance(value, tuple | list) else type(value).__name__
            raise MemOptError(f"{name} cannot be copied ({line_of(error)})") from error

    def replace(self, holders: Sequence[torch.nn.Module | torch.optim.Optimizer]) -> None:
        if self._target is None:
            self._held.append(-fake_tensors.bytes_of(holders, self._here))
        self._stack.enter_context(fake_tensors.replaced(holders, self.copy))

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._recorders[-1].within(name)

    def run(
        self, call: Callable[[], Any], held: object, finds_variables: bool = True, reads_floats: bool = False
    ) -> SimulatedStep:
        # The first run creates optimizer states, caches and gradients, which the second one finds in memory.
        self._record(call, held, reads_floats)
        run = self._record(call, held, reads_floats)
        if finds_variables:
            named = self._record(call, held, reads_floats, run.peak_at)
            run = named if named.peak == run.peak else run
        return self._shown(run)

    def _record(self, call: Callable[[], Any], held: object, reads_floats: bool, inspect_at: int = -1) -> LiveRun:
        torch.default_generator.manual_seed(0)
        recorder = LiveRecorder(_model_of(list(fake_tensors.reachable(held))), self._cuda, inspect_at, reads_floats)
        self._recorders.append(recorder)
        try:
            with recorder:
                _hold(recorder, held)
                recorder.outputs("result", call())
        except MemOptError:
            raise
        except Exception as error:
            raise MemOptError(_failure(error)) from error
        finally:
            self._recorders.pop()
        return recorder.run()

    def _shown(self, run: LiveRun) -> SimulatedStep:
        constant = self.constant
        given, _ = run.split()
        peak, reserved = constant + run.peak, None
        if self._cuda is not None:
            blocks = allocator_peak([constant], run.events, (), 0)
            peak, reserved = max(peak, blocks.allocated), blocks.reserved
        return SimulatedStep(
            constant + sum(storage.bytes for storage in given),
            peak,
            reserved,
            {phase: constant + size for phase, size in run.peaks.items() if size},
            run.timeline({}, constant),
        )

    @property
    def _here(self) -> torch.device:
        return stand_in_place(self._target)

    @property
    def _cuda(self) -> kernels.Multiprocessors | None:
        return multiprocessors(self._target, self._here)


def _hold(recorder: LiveRecorder, held: object) -> None:
    """Have the recorder count the tensors that exist before the step. Keeps none of them alive: a step may begin by
    freeing its gradients."""
    objects = list(fake_tensors.reachable(held))
    model = _model_of(objects)
    parameters = dict(model.named_parameters())
    states = (
        value
        for optimizer in objects
        if isinstance(optimizer, torch.optim.Optimizer)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    given: Mapping[str, Mapping[str, torch.Tensor]] = {
        PARAMETERS: {**parameters, **dict(named_buffers(model))},
        GRADIENTS: {name: value.grad for name, value in parameters.items() if value.grad is not None},
        OPTIMIZER: {f"state {place}": state for place, state in enumerate(states)},
        # Without real tensors, whose values are tracked.
        BATCH: {
            f"tensor {place}": found
            for place, found in enumerate(objects)
            if isinstance(found, torch.Tensor) and not fake_tensors.is_real(found)
        },
    }
    for category, tensors in given.items():
        recorder.hold(category, tensors)


def _model_of(objects: Sequence[object]) -> torch.nn.Module:
    """Returns the module that is not part of another one; several such modules in one `ModuleDict`."""
    modules = [found for found in objects if isinstance(found, torch.nn.Module)]
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    outer = [module for module in modules if id(module) not in parts]
    if len(outer) == 1:
        return outer[0]
    return torch.nn.ModuleDict({f"{type(module).__name__}_{place}": module for place, module in enumerate(outer)})


def _failure(error: Exception) -> str:
    where = place_of(error)
    if "convert all Tensors to FakeTensors" in str(error):
        return (
            f"the step uses a tensor that is not one of its arguments{where}; pass it, or its module, as an argument"
        )
    return f"the step cannot be run on tensors without data ({line_of(error)}{where})"
