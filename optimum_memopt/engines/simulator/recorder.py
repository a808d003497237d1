"""Records a step as plain PyTorch runs it: the module runs eagerly on fake tensors, storages count while alive.

A storage may be held by autograd, an output, a local variable or a key-value cache. Graphs do not show the last three,
so every run without an engine takes its events from here.
"""

import contextlib
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.compat.bitsandbytes import named_buffers
from optimum_memopt.compat.torch import dtype_name, tensors_in
from optimum_memopt.engines.api.layer_paths import layer_in, within_layer
from optimum_memopt.engines.api.predictions import (
    BATCH,
    GRADIENTS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    RECOMPUTED,
    SAVED,
    TEMPORARY,
)
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.simulator.live_run import BACKWARD, FORWARD, NO_GRAD, OPTIMIZER_STEP, LiveRun
from optimum_memopt.engines.simulator.work import Work, work_of
from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat import autograd, dynamo, fake_tensors
from optimum_memopt.engines.torch_compat.kernels import Multiprocessors
from optimum_memopt.errors import MemOptError

_PLACE = re.compile(r"\[\d+\]")


class Holder(NamedTuple):
    """The variable that holds a tensor: `name` in `function`, at `file:line`."""

    name: str
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} in {self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(eq=False)
class _Allocation:
    """A storage that the recorder follows.

    Attributes:
        module: path of the module that allocates it; for a parameter, the path of its layer.
        place: the Python variable that holds it.
        node: sequence number of the autograd node whose backward allocates it; -1 if none does.
    """

    bytes: int
    kind: str
    module: str
    in_backward: bool
    category: str = ""
    is_recomputed: bool = False
    place: Holder | None = None
    node: int = -1


@dataclass(eq=False)
class _Operator:
    name: str
    kind: str
    layer: str
    phase: str
    module: str = ""
    in_backward: bool = False
    allocates: list[int] = field(default_factory=list)
    workspace: int = 0
    frees: list[int] = field(default_factory=list)


class LiveRecorder(TorchDispatchMode):
    """Records the events of a step that runs within this context; enter it once.

    Args:
        model: the model whose modules name the operators.
        cuda: the CUDA device that is planned for, wherever the tensors are; None: the tensors' own device.
        inspect_at: index of an event during which Python variables are inspected; -1: none.
        reads_floats: reading an unknown floating-point number returns 1 instead of raising.

    Attributes:
        records_work: whether operators that run from now on are added to `LiveRun.calls`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cuda: Multiprocessors | None = None,
        inspect_at: int = -1,
        reads_floats: bool = False,
    ) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model, self._cuda, self._inspect_at = model, cuda, inspect_at
        self._allocations: list[_Allocation] = []
        self._operators: list[_Operator] = [_Operator("", "", "", FORWARD)]
        # Storage number by address; the address of a freed storage may be reused.
        self._alive: dict[int, int] = {}
        # If the latest operator adds gradients: the number of the first summand's storage, and the sum's address.
        self._sum: tuple[int, int] | None = None
        self._modules: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._phase = FORWARD
        self._hooks: list[Any] = []
        self._calls: list[Work] = []
        self._outermost: FrameType | None = None
        self._trained: set[str] = set()
        self._reads_floats, self.records_work = reads_floats, False
        self._is_behind_backward = False
        self._has_gradients = True
        self._is_paused = False
        self._marks: list[tuple[int, Hashable]] = []

    def __enter__(self) -> "LiveRecorder":
        self._outermost = sys._getframe(1)
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self.begin(OPTIMIZER_STEP)),
            register_optimizer_step_post_hook(self._updated),
            *(
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
                for name, parameter in self._model.named_parameters()
                if parameter.requires_grad
            ),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._outermost = None
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def hold(self, category: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Register tensors, by name, that existed before the step."""
        for name, tensor in tensors.items():
            # Parameters are grouped by dtype.
            kind = dtype_name(tensor.dtype) if category == PARAMETERS else name
            for storage in fake_tensors.storages(tensor):
                if (allocation := self._follow(storage, kind, layer_in(name))) is not None:
                    allocation.category = category

    def hold_step(self, batch: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor] | None = None) -> None:
        """Register what exists before a step: the model's tensors and gradients, optimizer states and the batch. Keeps
        none of them alive: a step may begin by freeing its gradients."""
        parameters = dict(self._model.named_parameters())
        self.hold(PARAMETERS, {**parameters, **dict(named_buffers(self._model))})
        self.hold(GRADIENTS, {name: each.grad for name, each in parameters.items() if each.grad is not None})
        self.hold(OPTIMIZER, states or {})
        self.hold(BATCH, batch)

    def begin(self, phase: str) -> None:
        """Start a phase; later frees are no longer attributed to the previous operator."""
        self._phase, self._is_behind_backward, self._sum = phase, False, None
        self._operators.append(_Operator("", "", "", phase, in_backward=phase == BACKWARD))

    def mark(self, moment: Hashable) -> None:
        """Record a moment; see `LiveRun.marks`."""
        self._marks.append((len(self._operators), moment))
        self.begin(self._phase)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run operators without recording them."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def names_of(self, tensors: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Returns the names that the events use for the storages of these tensors."""
        addresses = (storage.address for tensor in tensors for storage in fake_tensors.storages(tensor))
        return tuple(str(self._alive[address]) for address in addresses if address in self._alive)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> dict[int, int]:
        """Count the storages of these tensors as 0 bytes, since they are counted elsewhere.

        Returns:
            The bytes of the storages, by number.
        """
        held = [storage for tensor in tensors for storage in fake_tensors.storages(tensor)]
        for storage in held:
            self._follow(storage, "", "")
            self._allocations[self._alive[storage.address]].bytes = 0
        return {self._alive[storage.address]: storage.bytes for storage in held}

    def take_in(self, sizes: Mapping[int, int]) -> None:
        """Count left-out storages from now on if they are still alive; `sizes` has their bytes by number."""
        for address, number in self._alive.items():
            if number in sizes:
                self._alive[address] = len(self._allocations)
                self._operators[-1].allocates.append(len(self._allocations))
                self._allocations.append(replace(self._allocations[number], bytes=sizes[number]))

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Put the step into this phase; restores the previous phase on exit."""
        before = self._phase
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(before)

    def outputs(self, name: str, value: object) -> None:
        """Categorize the tensors in a caller's variable as outputs, including those in containers and attributes."""
        for path, tensor in _named_tensors(name, value):
            for allocation in self._followed(tensor):
                if not allocation.category:
                    allocation.category = OUTPUTS
                    # All layers of a key-value cache get the same kind.
                    allocation.kind = _PLACE.sub("", path)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        self._trained.add(name)
        assert parameter.grad is not None
        for allocation in self._followed(parameter.grad):
            allocation.category = allocation.category or GRADIENTS

    def _followed(self, tensor: torch.Tensor) -> Iterator[_Allocation]:
        addresses = (storage.address for storage in fake_tensors.storages(tensor))
        return (self._allocations[self._alive[address]] for address in addresses if address in self._alive)

    def run(self) -> LiveRun:
        """Returns the run recorded so far."""
        freed = {number: operator for operator in self._operators for number in operator.frees}

        def storage(number: int) -> Storage:
            held = self._allocations[number]
            category, kind = held.category, held.kind
            if not category:
                is_saved = not held.in_backward and (number not in freed or freed[number].in_backward)
                category = SAVED if is_saved else RECOMPUTED if held.is_recomputed else TEMPORARY
                if held.place is not None and not is_saved:
                    category, kind = OUTPUTS, str(held.place)
            layer = layer_in(held.module)
            return Storage(f"{number}", held.bytes, category, kind, layer, within_layer(held.module, layer))

        events = tuple(
            Event(
                operator.name,
                operator.kind,
                operator.layer,
                tuple(map(storage, operator.allocates)),
                operator.workspace,
                tuple(map(str, operator.frees)),
            )
            for operator in self._operators
        )
        phases, modules = zip(*((operator.phase, operator.module) for operator in self._operators), strict=True)
        calls, marks = tuple(self._calls), tuple(self._marks)
        return LiveRun(events, phases, modules, frozenset(self._trained), calls, marks)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (device := fake_tensors.device_asked(function, args)) is not None:
            return device
        kwargs = kwargs or {}
        if self._is_paused:
            return fake_tensors.call(function, args, kwargs)
        results = self._call(function, args, kwargs)
        node = autograd.current_node()
        if self.records_work and fake_tensors.runs_kernel(function):
            work = work_of(function, args, kwargs, results, None)
            # Checkpointed modules are also called in the backward.
            self._calls.append(replace(work, by_python=node is None or bool(self._modules)))
        phase, module = self._phase_of(node), self._module_of(node)
        new = [
            storage
            for leaf in tensors_in(results)
            for storage in fake_tensors.storages(leaf)
            if storage.address not in self._alive
        ]
        if new and not fake_tensors.runs_kernel(function) and any(map(fake_tensors.is_real, tensors_in(args))):
            # A view of a real tensor, which existed before the step.
            self.leave_out(tensors_in(results))
            return results
        workspace = int(operator_workspace(function, args, results, self._cuda))
        if not new and not workspace:
            return results
        kind = dynamo.operator_name(function)
        in_backward = node is not None or self._phase == BACKWARD
        name = f"{kind}_{len(self._operators)}"
        self._operators.append(
            _Operator(name, kind, layer_in(module), phase, module, in_backward, workspace=workspace)
        )
        for storage in new:
            if (allocation := self._follow(storage, kind, module)) is not None:
                allocation.is_recomputed = in_backward and bool(self._modules)
                allocation.node = autograd.order(node)
        self._sum = None
        scatters = autograd.scatters_gradient(function)
        if len(new) == 1 and (scatters or autograd.adds_gradients(function)):
            self._note_sum(args[0], new[0], autograd.order(node), scatters)
        if len(self._operators) - 1 == self._inspect_at:
            self._look_at_variables()
        return results

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns an operator's results on fake tensors.

        Raises:
            MemOptError: it reads data, or would give a gradient to a tensor that is not fake.
        """
        if torch.is_grad_enabled() and any(
            each.requires_grad and fake_tensors.is_real(each) for each in tensors_in(args)
        ):
            raise MemOptError("it trains a tensor that is not one of its arguments; pass it as an argument")
        try:
            return fake_tensors.call(function, args, kwargs)
        except fake_tensors.DATA_DEPENDENT as error:
            if self._reads_floats and dynamo.reads_a_number(function) and args[0].is_floating_point():
                return 1.0
            raise MemOptError(_reads_data(function)) from error

    def _phase_of(self, node: Any) -> str:
        """Returns the phase of an operator that this autograd node runs; None: Python runs it."""
        # After the backward, operators still count as backward until a module is called, such as gradient clipping.
        self._is_behind_backward = self._is_behind_backward or node is not None
        phase = BACKWARD if self._is_behind_backward else self._phase
        return NO_GRAD if phase == FORWARD and self._modules and not self._has_gradients else phase

    def _module_of(self, node: Any) -> str:
        """Returns the path of the module that runs now, or whose forward made this autograd node."""
        module = self._modules[-1] if self._modules else self._module_of_node.get(autograd.order(node), "")
        if node is None and torch.is_grad_enabled():
            self._module_of_node[autograd.last_order()] = module
        return module

    def _note_sum(self, first: torch.Tensor, total: fake_tensors.HeldStorage, node: int, scatters: bool) -> None:
        """Record that a sum of gradients may reuse the first one's storage, if nothing else holds that storage.

        Args:
            node: the autograd node that adds.
            scatters: the first one is a tensor of zeros, which the node has made.
        """
        for storage in fake_tensors.storages(first):
            number = self._alive.get(storage.address)
            if number is None or storage.bytes != total.bytes:
                continue
            # Formulas only scatter in place; and a gradient that the forward saved (-1) is never added to.
            made_by = self._allocations[number].node
            if made_by == node if scatters else made_by not in (-1, node):
                self._sum = number, total.address

    def _updated(self, *_: Any) -> None:
        # Nothing is freed until the training loop clears its gradients.
        self.begin(OPTIMIZER_STEP)
        self._phase = FORWARD

    def _follow(self, storage: fake_tensors.HeldStorage, kind: str, module: str) -> _Allocation | None:
        if storage.address in self._alive:
            return None
        operator = self._operators[-1]
        allocation = _Allocation(storage.bytes, kind, module, operator.in_backward)
        self._alive[storage.address] = len(self._allocations)
        operator.allocates.append(len(self._allocations))
        self._allocations.append(allocation)
        storage.on_release(self._free)
        return allocation

    def _free(self, address: int) -> None:
        if (number := self._alive.pop(address, None)) is None:
            return
        if self._sum is not None and number == self._sum[0]:
            # Nothing else held the first gradient: on real tensors the sum is computed in place.
            total, self._sum = self._sum[1], None
            self._operators[-1].allocates.remove(self._alive[total])
            self._alive[total] = number
            return
        self._operators[-1].frees.append(number)

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if autograd.current_node() is None:
            self._is_behind_backward = False
        if not self._modules:
            # Outermost module only: checkpointing may run a layer inside it without gradients.
            self._has_gradients = torch.is_grad_enabled()
        self._modules.append(self._names.get(id(module), self._modules[-1] if self._modules else ""))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    def _look_at_variables(self) -> None:
        for frame in _frames(self._outermost):
            for name, value in frame.f_locals.items():
                for path, tensor in _named_tensors(name, value):
                    place = Holder(path, frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)
                    for allocation in self._followed(tensor):
                        allocation.place = allocation.place or place


def loss_of(outputs: Any) -> torch.Tensor:
    """Returns the model's loss; without one, the first output that requires a gradient, summed if not a scalar.

    Raises:
        MemOptError: no output requires a gradient.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    leaves = (leaf for leaf in dynamo.tree_leaves(outputs) if isinstance(leaf, torch.Tensor))
    first = next((leaf for leaf in leaves if leaf.requires_grad), None)
    if first is None:
        raise MemOptError("nothing that the model returns has a gradient")
    return first if first.dim() == 0 else first.float().sum()


def _reads_data(function: Any) -> str:
    place = next(_frames(), None)
    where = "torch" if place is None else f"{place.f_code.co_filename}:{place.f_lineno}, in {place.f_code.co_name}"
    return (
        f"the value of a tensor is read ({dynamo.operator_name(function)} at {where}), which "
        "tensors without data do not have"
    )


def _frames(outermost: FrameType | None = None) -> Iterator[FrameType]:
    """Yields the frames of functions outside of torch and this package, innermost first.

    Args:
        outermost: the last frame to consider; None: all.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if dynamo.is_of_the_user(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back if frame is not outermost else None


def _named_tensors(name: str, value: object, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors, with paths, in containers and in attributes of objects other than modules and classes."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif not depth or isinstance(value, torch.nn.Module | ModuleType | type | str):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]", item, depth - 1)
    elif isinstance(value, list | tuple | set):
        for place, item in enumerate(value):
            yield from _named_tensors(f"{name}[{place}]", item, depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for key, item in vars(value).items():
            yield from _named_tensors(f"{name}.{key}", item, depth - 1)
