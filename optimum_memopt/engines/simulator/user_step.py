"""Runs any step of a user's on tensors without data, as plain PyTorch would on a device that need not be present."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optimum_memopt.engines.api.predictions import SimulatedStep
from optimum_memopt.engines.simulator.allocator import allocator_peak
from optimum_memopt.engines.simulator.devices import Device, device_of
from optimum_memopt.engines.simulator.live_run import LiveRun
from optimum_memopt.engines.simulator.recorder import LiveRecorder
from optimum_memopt.engines.simulator.standins import eager_standin, multiprocessors, stand_in_place
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors
from optimum_memopt.engines.torch_compat.compiler_errors import place_of
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.engines.torch_compat.trace_fixes import one_at_a_time
from optimum_memopt.errors import MemOptError, line_of
from optimum_memopt.generators import preserved_generators
from optimum_memopt.memory.capacity import Capacity, capacity, capacity_of
from optimum_memopt.memory.optimizers import state_tensors
from optimum_memopt.memory.peak_monitor import held_bytes


def simulator_of(device: str | None) -> contextlib.AbstractContextManager["Simulator"]:
    """Returns a context with a simulator, see `simulated`."""
    return _simulator(None if device is None else device_of(device))


@contextlib.contextmanager
def _simulator(target: Device | None) -> Iterator["Simulator"]:
    mode = fake_tensors.mode_without_pointers()
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time)
        stack.enter_context(preserved_generators())
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(eager_standin(target))
        stack.enter_context(fake_tensors.run_as_eager())
        stack.enter_context(mode)
        held = target.libraries if target is not None else held_bytes(stand_in_place(None))
        yield Simulator(target, mode, stack, [held])


@dataclass(frozen=True)
class Simulator:
    """Runs steps on fake tensors, as plain PyTorch would on a device.

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
        """Returns the memory capacity of the device."""
        return capacity(self._here) if self._target is None else capacity_of(self._target.memory)

    @property
    def shares_host(self) -> bool:
        """True if the device's memory is the host's."""
        return self._target is None and self._here.type == "cpu"

    @property
    def constant(self) -> int:
        """Returns the bytes that are always held beside the tensors of steps: by libraries and this process."""
        return max(0, sum(self._held))

    def copy(self, value: Any) -> Any:
        """Returns a deep copy of any value, with tensors without data. Raises MemOptError."""
        try:
            return fake_tensors.fake_copy(value, self._mode, self._here.type, keeps_values=True)
        # Copying an arbitrary user object may raise anything.
        except Exception as error:
            name = "an argument" if isinstance(value, tuple | list) else type(value).__name__
            raise MemOptError(f"{name} cannot be copied ({line_of(error)})") from error

    def replace(self, holders: Sequence[torch.nn.Module | torch.optim.Optimizer]) -> None:
        """Replace the tensors of modules and optimizers by tensors without data, until the simulator exits."""
        if self._target is None:
            self._held.append(-fake_tensors.bytes_of(holders, self._here))
        self._stack.enter_context(fake_tensors.replaced(holders, self.copy))

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context that assigns the running step's memory to the phase `name`."""
        return self._recorders[-1].within(name)

    def run(
        self, call: Callable[[], Any], held: object, finds_variables: bool = True, reads_floats: bool = False
    ) -> SimulatedStep:
        """Call the step twice, and a third time with `finds_variables`; the second call is counted.

        Args:
            call: a step on this simulator's tensors.
            held: object that holds the tensors existing before the step, and the modules that name its operators.
            finds_variables: call the step a third time, to find the variables that hold memory at the peak.
            reads_floats: reading an unknown floating-point number, as for logs, returns 1 instead of raising.

        Raises:
            MemOptError: one line: the step reads a tensor's value, or raises an error.
        """
        # The first run creates optimizer states, caches and gradients, which the second one finds in memory.
        self._record(call, held, reads_floats)
        run = self._record(call, held, reads_floats)
        if finds_variables:
            named = self._record(call, held, reads_floats, run.peak_at)
            run = named if named.peak == run.peak else run
        return self._shown(run)

    def _record(self, call: Callable[[], Any], held: object, reads_floats: bool, inspect_at: int = -1) -> LiveRun:
        torch.default_generator.manual_seed(0)
        model = _model_of(list(fake_tensors.reachable(held)))
        recorder = LiveRecorder(model, self._cuda, inspect_at, reads_floats)
        self._recorders.append(recorder)
        try:
            with recorder:
                recorder.hold_step(*_batch_and_states(held))
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
    def _cuda(self) -> Multiprocessors | None:
        return multiprocessors(self._target, self._here)


def _batch_and_states(held: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the tensors and the optimizer states that exist before the step."""
    objects = list(fake_tensors.reachable(held))
    optimizers = (found for found in objects if isinstance(found, torch.optim.Optimizer))
    states = itertools.chain.from_iterable(map(state_tensors, optimizers))
    # Without real tensors, whose values are tracked.
    batch = {
        f"tensor {place}": found
        for place, found in enumerate(objects)
        if isinstance(found, torch.Tensor) and not fake_tensors.is_real(found)
    }
    return batch, {f"state {place}": state for place, state in enumerate(states)}


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
