"""Peak memory of inductor's programs, found by running each on fake tensors with kernels that do nothing.

inductor fuses and reorders operators and reuses buffers, so that its peak is up to 40% off the liveness of the graphs
that it is given. Its scheduler's own estimate (`torch/_inductor/memory.py`) covers the first batch only, and is
missing when inductor loads the program from its cache. The program is there either way: a Python function that
allocates buffers, calls kernels and deletes buffers, for whatever sizes it is called with.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.engines.compile.graph.joint import Number, symbolic, value
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.requests import Request
from optimum_memopt.engines.compile.memory.timeline import Prediction, SavedForBackward, SavedStorage, Timeline
from optimum_memopt.engines.compile.memory.workspaces import operator_workspace
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.kernels import multiprocessors_of

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


@dataclass
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

    def counted(self, compiled: Callable[..., Any], ran: list["InductorPrograms"]) -> Callable[..., Any]:
        """`compiled`, each call of which is one of `runs`, and adds these programs to `ran`."""

        # Not `functools.wraps`: dynamo unwraps what is marked as its own.
        def run(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            ran.append(self)
            return compiled(*args, **kwargs)

        return run

    def add(self, graph: fx.Graph, runner: Any, is_backward: bool) -> None:
        """Note the program of a graph."""
        inputs = tuple((node.name, value(node)) for node in graph.find_nodes(op="placeholder"))
        program = InductorProgram(runner, inputs)
        if is_backward:
            self.backward = program
        else:
            self.forward = program


def simulate_programs(
    forward: InductorProgram, backward: InductorProgram, saved: SavedForBackward, stashed: int, values: SymbolValues
) -> Prediction:
    """What both programs hold when AOTAutograd runs them, as `GraphTimeline.predict` has it for graphs.

    Args:
        forward: its program.
        backward: its program.
        saved: storages that the forward saves for the backward.
        stashed: bytes held between the two.
        values: of every symbol.

    Raises:
        Exception: of any kind, from a program that needs more than shapes.
    """
    inputs = {
        name: SavedStorage(name, _extent(tensor, values))
        for name, tensor in backward.inputs
        if isinstance(tensor, torch.Tensor)
    }
    tangents = sum(storage.bytes for name, storage in inputs.items() if name not in saved)
    storages = {name: saved.get(name, storage) for name, storage in inputs.items()}
    owned = {name: storage for name, storage in storages.items() if storage is not None}
    in_forward, of_forward = _run(forward, {}, saved, 0, values)
    in_backward, of_backward = _run(backward, owned, None, stashed + tangents, values)
    given = [Request(name, storage.bytes) for name, storage in inputs.items() if name not in saved]
    return Prediction(in_forward, in_backward, stashed, requests=(*of_forward, *given, *of_backward))


def _run(
    program: InductorProgram,
    owned: Mapping[str, SavedStorage],
    saved: SavedForBackward | None,
    start: int,
    values: SymbolValues,
) -> tuple[Timeline, list[Request]]:
    """Run one program.

    Args:
        program: the one to run.
        owned: storages of the inputs that nobody else holds, by the input's name. Counted in `start`.
        saved: the tensors that a forward returns last, in their order; None: of a backward.
        start: bytes held before it.
        values: of every symbol.
    """
    tensors = [tensor for _, tensor in program.inputs if isinstance(tensor, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    tracker, others = _StorageTracker(device, start), []
    with dynamo.fake_tensors(), torch.no_grad():
        arguments = [_sized(argument, values) for _, argument in program.inputs]
        for (name, _), argument in zip(program.inputs, arguments, strict=True):
            if name in owned:
                storage, size = owned[name]
                tracker.add(argument, storage, size, counted_before=True)
            elif isinstance(argument, torch.Tensor):
                others.append(argument)
                tracker.ignore(argument)
        # The program clears the list and must be left with the only reference to each.
        argument = None
        with tracker:
            outputs = dynamo.silenced(program.runner)(program.runner, arguments)
        end = tracker.held
        log = list(tracker.log)
        # None stands for an input that is saved.
        returned = [tracker.name_of(value) for value in outputs if value is None or isinstance(value, torch.Tensor)]
    del outputs, others
    return Timeline(("inductor",), (tracker.peak,), end), _requests(log, owned, returned, saved)


def _requests(
    log: list[tuple[Any, int]],
    owned: Mapping[str, SavedStorage],
    returned: list[Any],
    saved: SavedForBackward | None,
) -> list[Request]:
    """What a program asked for, with names; what it returns and nobody saves is given back."""
    graph = "backward" if saved is None else "forward"
    names: dict[Any, str] = {storage.root: storage.root for storage in owned.values()}
    if saved:
        stays = zip(returned[-len(saved) :], saved.values(), strict=True)
        names |= {key: storage.root for key, storage in stays if storage is not None}
    for key in (*returned, *(key for key, _ in log)):
        names.setdefault(key, f"{graph} {len(names)}")
    requests = [Request(names[key], size) for key, size in log]
    dropped = returned[: len(returned) - len(saved)] if saved is not None else []
    return [*requests, *(Request(names[key], 0) for key in dropped)]


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
    """Counts the bytes of the storages that operators allocate on one device while it is active, each storage until
    the last tensor that uses it is gone.

    Attributes:
        held: bytes now.
        peak: highest `held` so far.
        log: names of storages with their bytes where they are allocated, with 0 where they are freed.
    """

    def __init__(self, device: torch.device, start: int) -> None:
        super().__init__()
        self.held = self.peak = start
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
            self.peak = max(self.peak, self.held + workspace)
            self.log += [("workspace", workspace), ("workspace", 0)]
        return outputs

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave out a tensor that others keep alive."""
        self.add(tensor, object(), 0)

    def add(self, tensor: torch.Tensor, name: Any, size: int, counted_before: bool = False) -> None:
        """Count a tensor's storage, unless it is counted already, until its last tensor is gone.

        Args:
            tensor: on the device.
            name: of its storage, where that has none yet.
            size: of its storage, in bytes.
            counted_before: `held` includes it.
        """
        setattr(tensor, _COUNTED, True)
        name = self._names.setdefault(dynamo.storage_id(tensor), name)
        if name not in self._bytes:
            self._bytes[name], self._users[name] = size, 0
            if size and not counted_before:
                self.held += size
                self.log.append((name, size))
            self.peak = max(self.peak, self.held)
        self._users[name] += 1
        weakref.finalize(tensor, self._release, name).atexit = False

    def name_of(self, tensor: torch.Tensor | None) -> Any:
        """Of the storage of a tensor that was added."""
        return None if tensor is None else self._names[dynamo.storage_id(tensor)]

    def _release(self, name: Any) -> None:
        self._users[name] -= 1
        if self._users[name]:
            return
        size = self._bytes.pop(name)
        self.held -= size
        if size:
            self.log.append((name, 0))
        self._names = {address: other for address, other in self._names.items() if other != name}
