"""Steps of a user's own on fake tensors, as plain PyTorch runs them on a device that may not be here."""

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimum_memopt.engines.api.predictions import BATCH, GRADIENTS, OPTIMIZER, PARAMETERS, SimulatedStep
from optimum_memopt.engines.compile.capture.device_standin import eager_standin, multiprocessors, stand_in_place
from optimum_memopt.engines.compile.costs.devices import Device, device_of
from optimum_memopt.engines.compile.memory.allocator import allocator_peak
from optimum_memopt.engines.compile.memory.live import LiveRecorder, LiveRun, is_of_the_user
from optimum_memopt.engines.compile.torch_compat import dynamo, fake_tensors, kernels
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.memory.capacity import Capacity, capacity, capacity_of
from optimum_memopt.memory.peak_monitor import held_bytes


def simulator(device: str | None) -> contextlib.AbstractContextManager["FakeSimulator"]:
    """A context in which tensors have no data.

    Raises:
        MemOptError: an unknown device.
    """
    return _simulator(None if device is None else device_of(device))


@contextlib.contextmanager
def _simulator(target: Device | None) -> Iterator["FakeSimulator"]:
    mode = fake_tensors.mode_without_pointers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
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
        _held: bytes of the process, and those of the tensors in it that were replaced, which are negative.
        _recorders: the one of the step that runs.
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
        # Whatever an object holds may refuse.
        except Exception as error:
            raise MemOptError(f"{_name_of(value)} cannot be copied ({line_of(error)})") from error

    def replace(self, holders: Sequence[torch.nn.Module | torch.optim.Optimizer]) -> None:
        if self._target is None:
            self._held.append(-fake_tensors.bytes_of(holders, self._here))
        self._stack.enter_context(fake_tensors.replaced(holders, self.copy))

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self._recorders[-1].within(name)

    def run(
        self, call: Callable[[], Any], held: object, finds_variables: bool = True, reads_floats: bool = False
    ) -> SimulatedStep:
        # The first leaves states of optimizers, caches, and gradients to the second.
        self._record(call, held, reads_floats)
        run = self._record(call, held, reads_floats)
        if finds_variables:
            named = self._record(call, held, reads_floats, run.peak_at)
            run = named if named.peak == run.peak else run
        return self._shown(run)

    def _record(self, call: Callable[[], Any], held: object, reads_floats: bool, inspect_at: int = -1) -> LiveRun:
        torch.manual_seed(0)
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
        most = {phase: run.most(phase) for phase in run.named_phases}
        return SimulatedStep(
            constant + sum(storage.bytes for storage in given),
            peak,
            reserved,
            {phase: constant + size for phase, size in most.items() if size},
            run.timeline({}, constant),
        )

    @property
    def _here(self) -> torch.device:
        return stand_in_place(self._target)

    @property
    def _cuda(self) -> kernels.Multiprocessors | None:
        return multiprocessors(self._target, self._here)


def _hold(recorder: LiveRecorder, held: object) -> None:
    """Tensors that were there before. Keeps none of them alive: a step may free its gradients first."""
    for category, tensors in _given(list(fake_tensors.reachable(held))).items():
        recorder.hold(category, tensors)


def _model_of(objects: Sequence[object]) -> torch.nn.Module:
    """The module among these that is no part of another, or all such modules in one."""
    modules = [found for found in objects if isinstance(found, torch.nn.Module)]
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    outer = [module for module in modules if id(module) not in parts]
    if len(outer) == 1:
        return outer[0]
    return torch.nn.ModuleDict({f"{type(module).__name__}_{place}": module for place, module in enumerate(outer)})


def _given(objects: Sequence[object]) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Tensors by category and name."""
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
    return {
        PARAMETERS: {**parameters, **dict(model.named_buffers())},
        GRADIENTS: {name: value.grad for name, value in parameters.items() if value.grad is not None},
        OPTIMIZER: {f"state {place}": state for place, state in enumerate(states)},
        BATCH: {f"tensor {place}": found for place, found in enumerate(objects) if isinstance(found, torch.Tensor)},
    }


def _failure(error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_of_the_user(frame.filename)]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    if "convert all Tensors to FakeTensors" in str(error):
        return f"the step uses a tensor that is none of its arguments{where}; give it, or its module, as an argument"
    return f"the step cannot be run on tensors without data ({line_of(error)}{where})"


def _name_of(value: Any) -> str:
    return type(value).__name__ if not isinstance(value, tuple | list) else "an argument"
