"""What inductor's programs hold: each is run on tensors without data, and every storage counted.

inductor fuses operators, reorders them and reuses memory, so that its peak is up to two fifths off the liveness of the
graphs that it is given. Its scheduler's own estimate (`torch/_inductor/memory.py`) is for the first batch alone, and
is not there when inductor finds the program in its cache. The program always is: a Python function that allocates,
calls kernels and lets go, in the sizes that it is given. Here it allocates nothing, and its kernels do nothing.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from optimum_memopt.engines.compile import compat
from optimum_memopt.engines.compile.analysis.joint import symbolic, value
from optimum_memopt.engines.compile.memory.liveness import Moment, Prediction, SavedForBackward, Sizes, Timeline

_COUNTED = "_memopt_counted"


@dataclass(frozen=True)
class InductorProgram:
    """What inductor wrote for one graph.

    Attributes:
        runner: the object whose method `call` it is.
        inputs: name of each placeholder and what the tracer put through, in order.
    """

    runner: Any
    inputs: tuple[tuple[str, Any], ...]


@dataclass
class InductorPrograms:
    """Of one training graph, as they come from inductor; None until then, and without inductor."""

    forward: InductorProgram | None = None
    backward: InductorProgram | None = None

    def saw(self, graph: fx.Graph, runner: Any, is_backward: bool) -> None:
        """Note the program of a graph."""
        program = InductorProgram(
            runner, tuple((node.name, value(node)) for node in graph.find_nodes(op="placeholder"))
        )
        if is_backward:
            self.backward = program
        else:
            self.forward = program


def simulate_programs(
    programs: InductorPrograms, saved_for_backward: SavedForBackward, stashed: int, sizes: Sizes
) -> Prediction:
    """What both programs hold when AOTAutograd runs them, as `liveness.predict` has it for graphs.

    Args:
        saved_for_backward: which inputs of the backward the forward hands over.
        stashed: bytes held between the two.

    Raises:
        Exception: of any kind, from a program that needs more than shapes.
    """
    forward = _run(programs.forward, {}, 0, sizes)
    inputs = {name: _bytes(found) for name, found in programs.backward.inputs if isinstance(found, torch.Tensor)}
    gradients = sum(int(size.subs(sizes)) for name, size in inputs.items() if name not in saved_for_backward)
    storages = {name: saved_for_backward.get(name, (name, size)) for name, size in inputs.items()}
    owned = {name: storage for name, storage in storages.items() if storage is not None}
    return Prediction(forward, _run(programs.backward, owned, stashed + gradients, sizes), stashed)


def _run(program: InductorProgram, owned: Mapping[str, tuple[str, sympy.Expr]], start: int, sizes: Sizes) -> Timeline:
    """Run one program.

    Args:
        owned: the inputs that nobody else holds, each with the name and bytes of its storage. Counted in `start`.
    """
    tensors = [found for _, found in program.inputs if isinstance(found, torch.Tensor)]
    device = next((one.device.type for one in tensors if one.device.type != "cpu"), "cpu")
    ledger, outside = _StorageTracker(device, start), []
    with compat.fake_tensors(), torch.no_grad():
        arguments = [_of_size(found, sizes) for _, found in program.inputs]
        for (name, _), argument in zip(program.inputs, arguments, strict=True):
            if name in owned:
                storage, size = owned[name]
                ledger.add(argument, storage, int(size.subs(sizes)), counted_before=True)
            elif isinstance(argument, torch.Tensor):
                outside.append(argument)
                ledger.ignore(argument)
        # The program clears the list, and must be left with the only reference to each.
        argument = None
        with ledger:
            outputs = compat.silenced(program.runner)(program.runner, arguments)
        end = ledger.held
    del outputs, outside
    return Timeline((Moment("inductor", ledger.peak),), end)


def _of_size(found: Any, sizes: Sizes) -> Any:
    if isinstance(found, torch.Tensor):
        shape, stride = ([int(symbolic(one).subs(sizes)) for one in many] for many in (found.shape, found.stride()))
        return torch.empty_strided(shape, stride, dtype=found.dtype, device=found.device)
    return int(symbolic(found).subs(sizes)) if isinstance(found, compat.SymbolicNumber) else found


def _bytes(tensor: torch.Tensor) -> sympy.Expr:
    last = sum((symbolic(n) - 1) * symbolic(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sympy.Integer(1) + last) * tensor.dtype.itemsize


class _StorageTracker(TorchDispatchMode):
    """Counts the storages of one device that operators allocate while it is on, each until nothing refers to it.

    Attributes:
        held: bytes now.
        peak: the most so far.
    """

    def __init__(self, device: str, start: int) -> None:
        super().__init__()
        self.held = self.peak = start
        self._device = device
        # Names of storages by address; bytes, and how many tensors refer to each, by name.
        self._names: dict[int, Any] = {}
        self._bytes: dict[Any, int] = {}
        self._users: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and not hasattr(tensor, _COUNTED):
                storage = tensor.untyped_storage()
                on_device = tensor.device.type == self._device
                self.add(tensor, object(), storage.nbytes() if on_device else 0)
        return outputs

    def ignore(self, tensor: torch.Tensor) -> None:
        """A tensor that others hold, who keep it alive."""
        self.add(tensor, object(), 0)

    def add(self, tensor: torch.Tensor, name: Any, size: int, counted_before: bool = False) -> None:
        """Count a tensor's storage, unless it is known, until the last tensor in it is gone."""
        setattr(tensor, _COUNTED, True)
        name = self._names.setdefault(tensor.untyped_storage()._cdata, name)
        if name not in self._bytes:
            self._bytes[name], self._users[name] = size, 0
            self.held += 0 if counted_before else size
            self.peak = max(self.peak, self.held)
        self._users[name] += 1
        weakref.finalize(tensor, self._leave, name).atexit = False

    def _leave(self, name: Any) -> None:
        self._users[name] -= 1
        if self._users[name]:
            return
        self.held -= self._bytes.pop(name)
        self._names = {address: other for address, other in self._names.items() if other != name}
