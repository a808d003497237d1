"""The events of inductor's programs, recorded by running each on fake tensors with kernels that do nothing.

inductor fuses and reorders operators and reuses buffers, so its peak differs by up to 40% from the liveness of its
input graph. Its scheduler's own estimate (`torch/_inductor/memory.py`) covers the first batch only, and is missing
if inductor loads the program from its cache. The program always exists: a Python function that allocates buffers,
calls kernels and deletes buffers, for any sizes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.engines.api.predictions import GRADIENTS, TEMPORARY
from optimum_memopt.engines.compile.graph.joint import is_accumulation_operator, value
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat import dynamo, fake_tensors, inductor
from optimum_memopt.engines.torch_compat.kernels import multiprocessors_of
from optimum_memopt.engines.torch_compat.traced_sizes import Number, symbolic

_WORKSPACE = "workspace"
# Key of a program's result that is not a tensor.
_NO_TENSOR = object()


@dataclass(frozen=True)
class InductorProgram:
    """The program that inductor wrote for one graph: the method `call` of its runner.

    Attributes:
        inputs: name and fake value of each placeholder, in order.
    """

    runner: Any
    inputs: tuple[tuple[str, Any], ...]


@dataclass(eq=False)
class InductorPrograms:
    """The programs of one training graph.

    Attributes:
        forward: None until inductor has compiled it, and without inductor; `backward` likewise.
    """

    forward: InductorProgram | None = None
    backward: InductorProgram | None = None

    @property
    def both(self) -> tuple[InductorProgram, InductorProgram] | None:
        """Returns forward and backward; None until inductor has compiled both."""
        return (self.forward, self.backward) if self.forward and self.backward else None

    def add(self, graph: fx.Graph, runner: Any, is_backward: bool) -> None:
        inputs = tuple((node.name, value(node)) for node in graph.find_nodes(op="placeholder"))
        program = InductorProgram(runner, inputs)
        if is_backward:
            self.backward = program
        else:
            self.forward = program


def program_events(
    forward: InductorProgram, backward: InductorProgram, graph: GraphEvents, values: SymbolValues
) -> GraphEvents:
    """Returns the events of both programs as AOTAutograd runs them, one event per allocation.

    Args:
        graph: the events of the graphs that they were compiled from, for the same values.
        values: the value of every symbol.

    Raises:
        Exception: of any kind, from a program that needs more than shapes.
    """
    saved = {storage.name: storage for storage in graph.saved}
    places = {name: saved[storage] if storage else None for name, storage in graph.saved_values}
    sizes = {name: _extent(tensor, values) for name, tensor in backward.inputs if isinstance(tensor, torch.Tensor)}
    owned = {name: place for name, size in sizes.items() if (place := places.get(name, Storage(name, size)))}
    (log, returned), (backward_log, gradients) = _run(forward, {}, values), _run(backward, owned, values)
    # The last tensors that a forward returns are the saved ones.
    tensors = [key for key in returned if key is not _NO_TENSOR]
    kept = tensors[len(tensors) - len(places) :]
    names = {key: place.name for key, place in zip(kept, places.values(), strict=True) if place}
    names_in_backward: dict[Any, str] = {place.name: place.name for place in owned.values()}
    freed = {key for key, size in backward_log if not size}

    def of_forward(key: Any) -> str:
        return names.setdefault(key, f"forward {len(names)}")

    def of_backward(key: Any) -> str:
        return names_in_backward.setdefault(key, f"backward {len(names_in_backward)}")

    def in_forward(key: Any, size: int) -> Storage:
        name = of_forward(key)
        return saved[name]._replace(bytes=size) if name in saved else Storage(name, size)

    def in_backward(key: Any, size: int) -> Storage:
        return Storage(of_backward(key), size, TEMPORARY if key in freed else GRADIENTS)

    events = replace(
        graph,
        forward=_events(log, in_forward, of_forward),
        backward=_events(backward_log, in_backward, of_backward),
        outputs=_named(graph.outputs, returned[: len(graph.outputs)], of_forward),
        tangents=tuple(
            (position, tangent._replace(bytes=sizes[tangent.name])) for position, tangent in graph.tangents
        ),
        gradients=_named(graph.gradients, gradients, of_backward),
    )
    return events.as_run()


def _named(
    places: Sequence[tuple[int | None, str]], keys: Sequence[Any], name: Callable[[Any], str]
) -> tuple[tuple[int | None, str], ...]:
    """Returns the positions of the graph's results with the names of the program's storages."""
    return tuple(
        (position, name(key) if graph_name and key is not None and key is not _NO_TENSOR else "")
        for (position, graph_name), key in zip(places, keys, strict=True)
    )


def _events(
    log: Sequence[tuple[Any, int]], storage_of: Callable[[Any, int], Storage], name: Callable[[Any], str]
) -> tuple[Event, ...]:
    events: list[Event] = []
    for key, size in log:
        if key == _WORKSPACE:
            if size:
                events.append(Event(_WORKSPACE, _WORKSPACE, workspace=size))
        elif size:
            storage = storage_of(key, size)
            events.append(Event(storage.name, storage.kind, storage.layer, (storage,)))
        else:
            last = events.pop() if events else Event("")
            events.append(last._replace(frees=(*last.frees, name(key))))
    return tuple(events)


def _run(
    program: InductorProgram, owned: Mapping[str, Storage], values: SymbolValues
) -> tuple[list[tuple[Any, int]], list[Any]]:
    """Run one program.

    Args:
        owned: storages of the inputs that only the program holds, by input name.

    Returns:
        `_StorageTracker.log`, and the keys of its results; None for an input that is returned unchanged.
    """
    tensors = [tensor for _, tensor in program.inputs if isinstance(tensor, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    tracker, shared = _StorageTracker(device), []
    with dynamo.fake_tensors(), torch.no_grad():
        arguments = [_sized(argument, values) for _, argument in program.inputs]
        for (name, _), argument in zip(program.inputs, arguments, strict=True):
            if name in owned:
                tracker.add(argument, owned[name].name, owned[name].bytes, is_given=True)
            elif isinstance(argument, torch.Tensor):
                shared.append(argument)
                tracker.add(argument, object(), 0)
        # The program clears the list; it must hold the only reference to each argument.
        argument = None
        with tracker:
            outputs = inductor.silenced(program.runner)(program.runner, arguments)
        log = list(tracker.log)
        returned = [_key(output, tracker) for output in outputs]
    del outputs, shared
    return log, returned


def _key(output: Any, tracker: "_StorageTracker") -> Any:
    if isinstance(output, torch.Tensor):
        return tracker.name_of(output)
    # A program returns None for an input that is saved.
    return None if output is None else _NO_TENSOR


def _sized(argument: Any, values: SymbolValues) -> Any:
    """Returns an input for these values of the symbols: a fake tensor or a number."""
    if isinstance(argument, torch.Tensor):
        shape, stride = _layout(argument, values)
        return torch.empty_strided(shape, stride, dtype=argument.dtype, device=argument.device)
    return _integer(argument, values) if isinstance(argument, dynamo.SymbolicNumber) else argument


def _layout(tensor: torch.Tensor, values: SymbolValues) -> tuple[list[int], list[int]]:
    return [_integer(size, values) for size in tensor.shape], [_integer(step, values) for step in tensor.stride()]


def _integer(number: Number, values: SymbolValues) -> int:
    return number if isinstance(number, int) else int(symbolic(number).subs(values))


def _extent(tensor: torch.Tensor, values: SymbolValues) -> int:
    """Returns the bytes from the first element of a tensor to the last."""
    shape, stride = _layout(tensor, values)
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * tensor.dtype.itemsize


class _StorageTracker(TorchDispatchMode):
    """Logs the allocation and free of storages on one device while it is active.

    Attributes:
        log: names of storages, with their bytes for an allocation and 0 for a free.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self._cuda = multiprocessors_of(device)
        # Name and bytes by address; the address of a freed storage may be reused.
        self._alive: dict[int, tuple[Any, int]] = {}
        # By name, the living inputs that are views of one storage; each is followed as a storage of its own.
        self._views: Counter[Any] = Counter()
        self.log: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dynamo.reads_a_number(func) and dynamo.is_fake(args[0]):
            # On CUDA a CPU scalar is passed to a kernel as a number (DeBERTa's scale); here kernels do nothing.
            return 1.0 if args[0].is_floating_point() else 1
        outputs = func(*args, **(kwargs or {}))
        for tensor in dynamo.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                on_device = tensor.device.type == self._device
                # Without an earlier gradient, the new one is kept as a copy.
                counted = args[0] if is_accumulation_operator(func) else tensor
                self.add(tensor, object(), counted.untyped_storage().nbytes() if on_device else 0)
        if workspace := int(operator_workspace(func, args, outputs, self._cuda)):
            self.log += [(_WORKSPACE, workspace), (_WORKSPACE, 0)]
        return outputs

    def add(self, tensor: torch.Tensor, name: Any, size: int, is_given: bool = False) -> None:
        """Follow a tensor's storage until it is freed, unless it is followed already.

        Args:
            size: bytes of its storage; 0 leaves it out of the log.
            is_given: the storage existed before, so its allocation is not logged.
        """
        for storage in fake_tensors.storages(tensor):
            if storage.address not in self._alive:
                self._alive[storage.address] = name, size
                self._views[name] += is_given
                if size and not is_given:
                    self.log.append((name, size))
                storage.on_release(self._release)

    def name_of(self, tensor: torch.Tensor) -> Any:
        """Returns the name of the storage of a tensor that was added."""
        return self._alive[dynamo.storage_id(tensor)][0]

    def _release(self, address: int) -> None:
        name, size = self._alive.pop(address)
        self._views[name] -= 1
        if size and self._views[name] < 1:
            self.log.append((name, 0))
