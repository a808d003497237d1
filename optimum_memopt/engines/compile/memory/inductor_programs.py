"""The events of inductor's programs, found by running each on fake tensors with kernels that do nothing.

inductor fuses and reorders operators and reuses buffers, so that its peak is up to 40% off the liveness of the graphs
that it is given. Its scheduler's own estimate (`torch/_inductor/memory.py`) covers the first batch only, and is
missing when inductor loads the program from its cache. The program is there either way: a Python function that
allocates buffers, calls kernels and deletes buffers, for whatever sizes it is called with.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.engines.api.predictions import GRADIENTS, TEMPORARY
from optimum_memopt.engines.compile.graph.joint import Number, symbolic, value
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.events import Event, GraphEvents, Storage
from optimum_memopt.engines.compile.memory.tape import TapeRecorder
from optimum_memopt.engines.compile.memory.workspaces import operator_workspace
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.kernels import multiprocessors_of

_WORKSPACE = "workspace"
_COUNTED = "_memopt_counted"


@dataclass(frozen=True)
class InductorProgram:
    """The program that inductor wrote for one graph.

    Attributes:
        runner: the object whose method `call` it is.
        inputs: name and fake value of each placeholder, in order.
    """

    runner: Any
    inputs: tuple[tuple[str, Any], ...]


@dataclass(eq=False)
class InductorPrograms:
    """The programs of one training graph, as far as they are known.

    Attributes:
        forward: None until inductor has compiled it, and without inductor.
        backward: likewise.
        runs: how often the graph has run. Layers that are compiled one by one share a graph.
    """

    forward: InductorProgram | None = None
    backward: InductorProgram | None = None
    runs: int = 0

    @property
    def both(self) -> tuple[InductorProgram, InductorProgram] | None:
        """Forward and backward, once inductor has compiled them."""
        return (self.forward, self.backward) if self.forward and self.backward else None

    def recorded(self, compiled: Callable[..., Any], tape: TapeRecorder) -> Callable[..., Any]:
        """`compiled`, each call of which is one of `runs`, and one on the tape."""

        # Not `functools.wraps`: dynamo unwraps what is marked as its own.
        def run(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            tape.before(self, args)
            results = compiled(*args, **kwargs)
            tape.after(results if isinstance(results, tuple | list) else [results])
            return results

        return run

    def add(self, graph: fx.Graph, runner: Any, is_backward: bool) -> None:
        """Note the program of a graph."""
        inputs = tuple((node.name, value(node)) for node in graph.find_nodes(op="placeholder"))
        program = InductorProgram(runner, inputs)
        if is_backward:
            self.backward = program
        else:
            self.forward = program


def program_events(
    forward: InductorProgram, backward: InductorProgram, graph: GraphEvents, values: SymbolValues
) -> GraphEvents:
    """The storages that both programs allocate and free when AOTAutograd runs them: an event for each allocation.

    Args:
        graph: the events of the graphs that they were compiled from, for the same values.
        values: of every symbol.

    Raises:
        Exception: of any kind, from a program that needs more than shapes.
    """
    saved = {storage.name: storage for storage in graph.saved}
    places = {name: saved[storage] if storage else None for name, storage in graph.saved_values}
    inputs = {name: _extent(tensor, values) for name, tensor in backward.inputs if isinstance(tensor, torch.Tensor)}
    owned = {name: places.get(name, Storage(name, size)) for name, size in inputs.items()}
    tangents = {name: size for name, size in inputs.items() if name not in places}
    ran, again = _run(forward, {}, values), _run(backward, {k: v for k, v in owned.items() if v}, values)
    # The tensors that a forward returns last are saved.
    returned = [key for key in ran.returned if not isinstance(key, _Number)]
    kept = returned[len(returned) - len(places) :]
    names = {key: place.name for key, place in zip(kept, places.values(), strict=True) if place}
    of_forward, of_backward = _Names("forward", names), _Names("backward", {name: name for name in again.owned})
    results = ran.returned[: len(graph.outputs)]
    freed = {key for key, size in again.log if not size}
    return replace(
        graph,
        forward=_events(ran.log, lambda key, size: saved_as(saved, of_forward(key), size), of_forward),
        backward=_events(
            again.log,
            lambda key, size: Storage(of_backward(key), size, TEMPORARY if key in freed else GRADIENTS),
            of_backward,
        ),
        outputs=_named(graph.outputs, results, of_forward),
        tangents=tuple(
            (position, storage._replace(bytes=tangents[storage.name])) for position, storage in graph.tangents
        ),
        gradients=_named(graph.gradients, again.returned, of_backward),
    )


def saved_as(saved: Mapping[str, Storage], name: str, size: int) -> Storage:
    """A storage of a forward's program: as the graph's, where that saves it."""
    return saved[name]._replace(bytes=size) if name in saved else Storage(name, size)


class _Number(int):
    """A result of a program that is no tensor."""


class _Names:
    """Names for the storages of one program."""

    def __init__(self, prefix: str, names: Mapping[Any, str]) -> None:
        self._prefix = prefix
        self._names: dict[Any, str] = dict(names)

    def __call__(self, key: Any) -> str:
        return self._names.setdefault(key, f"{self._prefix} {len(self._names)}")


def _named(
    places: Sequence[tuple[int | None, str]], keys: Sequence[Any], name: Callable[[Any], str]
) -> tuple[tuple[int | None, str], ...]:
    """The graph's results with the names of the program's."""
    return tuple(
        (position, name(key) if graph_name and key is not None and not isinstance(key, _Number) else "")
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


class _Run(NamedTuple):
    """The events of a program.

    Attributes:
        log: keys of storages with their bytes where they are allocated, with 0 where they are freed.
        returned: keys of what it returns; None for an input that it returns as it is.
        owned: names of the storages that it was given to free.
    """

    log: list[tuple[Any, int]]
    returned: list[Any]
    owned: tuple[str, ...]


def _run(program: InductorProgram, owned: Mapping[str, Storage], values: SymbolValues) -> _Run:
    """Run one program.

    Args:
        owned: storages of the inputs that nobody else holds, by the input's name.
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
                tracker.ignore(argument)
        # The program clears the list and must be left with the only reference to each.
        argument = None
        with tracker:
            outputs = dynamo.silenced(program.runner)(program.runner, arguments)
        log = list(tracker.log)
        # None stands for an input that is saved.
        returned = [
            tracker.name_of(value) if value is None or isinstance(value, torch.Tensor) else _Number()
            for value in outputs
        ]
    del outputs, shared
    return _Run(log, returned, tuple(storage.name for storage in owned.values()))


def _sized(argument: Any, values: SymbolValues) -> Any:
    """An input for these values of the symbols: a fake tensor or a number."""
    if isinstance(argument, torch.Tensor):
        shape, stride = _layout(argument, values)
        return torch.empty_strided(shape, stride, dtype=argument.dtype, device=argument.device)
    return _integer(argument, values) if isinstance(argument, dynamo.SymbolicNumber) else argument


def _layout(tensor: torch.Tensor, values: SymbolValues) -> tuple[list[int], list[int]]:
    return [_integer(size, values) for size in tensor.shape], [_integer(step, values) for step in tensor.stride()]


def _integer(number: Number, values: SymbolValues) -> int:
    return number if isinstance(number, int) else int(symbolic(number).subs(values))


def _extent(tensor: torch.Tensor, values: SymbolValues) -> int:
    """Bytes from the first element to the last."""
    shape, stride = _layout(tensor, values)
    return (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))) * tensor.dtype.itemsize


class _StorageTracker(TorchDispatchMode):
    """Logs the storages that operators allocate on one device while it is active, each until the last tensor that uses
    it is gone.

    Attributes:
        log: names of storages with their bytes where they are allocated, with 0 where they are freed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device.type
        self._cuda = multiprocessors_of(device)
        # Names of storages by address; bytes, and how many tensors use each, by name.
        self._names: dict[int, Any] = {}
        self._bytes: dict[Any, int] = {}
        self._users: dict[Any, int] = {}
        self.log: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if dynamo.reads_a_number(func) and dynamo.is_fake(args[0]):
            # On CUDA a kernel is given a scalar of the CPU as a number (DeBERTa's scale); here kernels do nothing.
            return 1.0 if args[0].is_floating_point() else 1
        outputs = func(*args, **(kwargs or {}))
        for tensor in dynamo.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and not hasattr(tensor, _COUNTED):
                storage = tensor.untyped_storage()
                on_device = tensor.device.type == self._device
                self.add(tensor, object(), storage.nbytes() if on_device else 0)
        if workspace := int(operator_workspace(func, args, outputs, self._cuda)):
            self.log += [(_WORKSPACE, workspace), (_WORKSPACE, 0)]
        return outputs

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave out a tensor that others keep alive."""
        self.add(tensor, object(), 0)

    def add(self, tensor: torch.Tensor, name: Any, size: int, is_given: bool = False) -> None:
        """Log a tensor's storage, unless that was done already, until its last tensor is gone.

        Args:
            tensor: on the device.
            name: of its storage, where that has none yet.
            size: of its storage, in bytes.
            is_given: it was there before.
        """
        setattr(tensor, _COUNTED, True)
        name = self._names.setdefault(dynamo.storage_id(tensor), name)
        if name not in self._bytes:
            self._bytes[name], self._users[name] = size, 0
            if size and not is_given:
                self.log.append((name, size))
        self._users[name] += 1
        weakref.finalize(tensor, self._release, name).atexit = False

    def name_of(self, tensor: torch.Tensor | None) -> Any:
        """That of the storage of a tensor that was added."""
        return None if tensor is None else self._names[dynamo.storage_id(tensor)]

    def _release(self, name: Any) -> None:
        self._users[name] -= 1
        if self._users[name]:
            return
        if self._bytes.pop(name):
            self.log.append((name, 0))
        self._names = {address: other for address, other in self._names.items() if other != name}
