"""Offloads or recomputes arguments of a graph's run that its backward reads, so that they are not held until then.

Both happen around the graph, whose partition stays the same. An offloaded argument is copied to the host while the run
computes, and reloaded while the backward of the next run computes. For a recomputed argument, the run that returned it
is rerun, so that only the first input of a segment of layers is held (Chen et al. 2016,
https://arxiv.org/abs/1604.06174). Saved-tensor hooks do this without a change to the model's own loop.
"""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from optimum_memopt.compat.torch import without_modes, writes_to
from optimum_memopt.engines.compile.capture.moved_state import SavedState, StateArgs
from optimum_memopt.engines.compile.partition.choice import InputsPlan
from optimum_memopt.engines.compile.partition.host_copies import offload, reload
from optimum_memopt.engines.torch_compat import dynamo


@dataclass(eq=False)
class _Argument:
    """An argument that is not held between forward and backward.

    Attributes:
        offset: storage offset of the original tensor.
        saved: how often autograd has saved the argument or a view of it.
        opened: how many of these saved tensors a backward has read.
        value: the reloaded or recomputed tensor; None while it is not held.
    """

    offset: int
    saved: int = 0
    opened: int = 0
    value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        raise NotImplementedError

    def open(self) -> torch.Tensor:
        """Returns the value for the backward; the last read of a backward drops it here."""
        value = self.get()
        self.opened += 1
        if self.opened == self.saved:
            self.opened, self.value = 0, None
        return value


class _View(NamedTuple):
    """A view of an argument, relative to the argument's offset."""

    argument: _Argument
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, argument: _Argument) -> "_View":
        return cls(argument, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - argument.offset)

    def of_value(self, value: torch.Tensor) -> torch.Tensor:
        return value.as_strided(self.shape, self.strides, value.storage_offset() + self.offset)


class _Held(NamedTuple):
    """A tensor that is held between forward and backward, with the number of writes to it so far."""

    tensor: torch.Tensor
    writes: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Held":
        return cls(tensor, writes_to(tensor))

    def open(self) -> torch.Tensor:
        """Returns the tensor. Raises RuntimeError if it was written to, as autograd does for tensors that it saves
        without hooks (`torch/csrc/autograd/saved_variable.cpp`)."""
        if writes_to(self.tensor) != self.writes:
            shape = list(self.tensor.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {shape} was written to between a forward and its backward; write to a copy"
            )
        return self.tensor


@dataclass(eq=False, kw_only=True)
class _Offloaded(_Argument):
    """An argument on the host; `before` is the one offloaded before it, whose backward comes next."""

    host: torch.Tensor
    device: torch.device
    before: "_Offloaded | None"

    def begin(self) -> None:
        if self.value is None:
            self.value = reload(self.host, self.device)

    def get(self) -> torch.Tensor:
        self.begin()
        assert self.value is not None
        if self.before is not None:
            self.before.begin()
        waited: torch.Tensor = torch.ops.optimum_memopt.wait(self.value, self.host, [])
        return waited


class _Random(NamedTuple):
    """States of the random generators of the CPU and of devices."""

    cpu: torch.Tensor
    devices: list[int]
    states: list[torch.Tensor]

    @classmethod
    def now(cls, args: Sequence[Any]) -> "_Random":
        return cls(torch.get_rng_state(), *get_device_states(*args))

    def is_equal(self, other: "_Random") -> bool:
        pairs = zip((self.cpu, *self.states), (other.cpu, *other.states), strict=True)
        # The states are real tensors even if the forward runs on fake ones.
        with without_modes():
            return all(itertools.starmap(torch.equal, pairs))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set the generators to these states within the context, and restore them afterwards."""
        kind = torch.accelerator.current_accelerator() if self.devices else None
        kind_name = kind.type if kind is not None else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind_name):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=kind_name)
            yield


@dataclass(eq=False)
class _Repeated:
    """A run that a backward reruns.

    Attributes:
        run: the compiled graph.
        args: its arguments, with tensors other than parameters replaced by `_Held`, or by `_View` if not held.
        gathered: returns a context in which the parameters among the arguments are gathered.
        random: generator states before the run; None if it draws nothing.
        results: results that are recomputed arguments of other runs, by their positions.
    """

    run: Callable[..., Any]
    args: Sequence[Any]
    gathered: Callable[[], contextlib.AbstractContextManager[None]]
    random: _Random | None
    results: "weakref.WeakValueDictionary[int, _Recomputed]" = field(default_factory=weakref.WeakValueDictionary)

    def again(self) -> None:
        """Rerun, and set the values of `results`."""
        args = [
            arg.of_value(arg.argument.get())
            if isinstance(arg, _View)
            else arg.open()
            if isinstance(arg, _Held)
            else arg
            for arg in self.args
        ]
        with self.gathered(), contextlib.nullcontext() if self.random is None else self.random.again():
            # Detached, so that autograd saves nothing.
            results = listed(self.run(*(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)))
        for place, result in self.results.items():
            result.value = results[place].detach()


@dataclass(eq=False, kw_only=True)
class _Recomputed(_Argument):
    source: _Repeated

    def get(self) -> torch.Tensor:
        if self.value is None:
            self.source.again()
        assert self.value is not None
        return self.value


class _Result(NamedTuple):
    """A result of a run that may be rerun.

    Attributes:
        place: its position among the results.
        storage: keeps the id of its storage from being reused.
        writes: the number of writes to it so far.
    """

    source: _Repeated
    place: int
    offset: int
    storage: dynamo.StorageWeakRef
    writes: int


class LayerInputs:
    """Runs graphs of one forward with offloaded or recomputed arguments, and keeps the runs to rerun."""

    def __init__(self) -> None:
        self._last: _Offloaded | None = None
        # By storage.
        self._returned: dict[int, _Result] = {}

    def possible(self, plan: InputsPlan, args: Sequence[Any]) -> InputsPlan:
        """Returns the plan without recomputed arguments that no run has returned, such as those changed by a hook, or
        that were written to since."""
        known = set()
        for at in plan.recomputed:
            returned = self._returned.get(dynamo.storage_id(args[at]))
            if returned is not None and returned.writes == writes_to(args[at]):
                known.add(at)
        return plan if known == plan.recomputed else replace(plan, recomputed=frozenset(known))

    def run(
        self,
        run: Callable[..., Any],
        plan: InputsPlan,
        gathered: Callable[[], contextlib.AbstractContextManager[None]],
        state: StateArgs,
    ) -> Any:
        """Run a graph, and return its results.

        Args:
            run: the compiled graph.
            plan: the arguments to offload or recompute, and whether the run is to be rerun for another one.
            gathered: returns a context in which the parameters among the arguments are gathered, for reruns.
            state: arguments of the run.
        """
        # autograd holds `pack` as long as the saved tensors, so `pack` must not hold arguments.
        args, saved_state = state.args, state.saved
        arguments: dict[int, _Argument] = {}
        # Detached: the copies are not part of the forward's autograd graph.
        offloaded = {place: args[place].detach() for place in sorted(plan.offloaded)}
        for given in offloaded.values():
            self._last = _Offloaded(
                int(given.storage_offset()), host=offload(given), device=given.device, before=self._last
            )
            arguments[dynamo.storage_id(given)] = self._last
        for place in sorted(plan.recomputed):
            earlier = self._returned[storage := dynamo.storage_id(args[place])]
            recomputed = _Recomputed(earlier.offset, source=earlier.source)
            arguments[storage] = earlier.source.results.setdefault(earlier.place, recomputed)

        def unless_held(value: Any) -> Any:
            argument = arguments.get(dynamo.storage_id(value)) if isinstance(value, torch.Tensor) else None
            return value if argument is None else _View.of(value, argument)

        def pack(saved: torch.Tensor) -> torch.Tensor | _View | _Held | SavedState:
            if saved_state is not None and (of_state := saved_state(saved)) is not None:
                return of_state
            packed = unless_held(saved)
            if isinstance(packed, _View):
                packed.argument.saved += 1
                return packed
            # ZeRO 3 frees a parameter's data and later assigns new tensors.
            return saved if isinstance(saved, torch.nn.Parameter) else _Held.of(saved.detach())

        random = _Random.now(args) if plan.is_repeated else None
        with saved_tensors_hooks(pack, _unpacked):
            results = run(*args)
        for given in offloaded.values():
            argument = arguments[dynamo.storage_id(given)]
            assert isinstance(argument, _Offloaded)
            torch.ops.optimum_memopt.wait(argument.host, given, [])
        if random is not None:
            is_drawn = not random.is_equal(_Random.now(args))
            held = [arg.clone() if at in state.copied else _held(unless_held(arg)) for at, arg in enumerate(args)]
            repeated = _Repeated(run, held, gathered, random if is_drawn else None)
            for at, result in enumerate(listed(results)):
                if isinstance(result, torch.Tensor):
                    alive, offset = dynamo.StorageWeakRef(result.untyped_storage()), int(result.storage_offset())
                    returned = _Result(repeated, at, offset, alive, writes_to(result))
                    self._returned[dynamo.storage_id(result)] = returned
        return results


def listed(results: Any) -> Sequence[Any]:
    """Returns the results of a run as a sequence, also a single one."""
    return results if isinstance(results, tuple | list) else [results]


def _held(argument: Any) -> Any:
    is_other = isinstance(argument, torch.Tensor) and not isinstance(argument, torch.nn.Parameter)
    return _Held.of(argument) if is_other else argument


def _unpacked(packed: torch.Tensor | _View | _Held | SavedState) -> torch.Tensor:
    if isinstance(packed, SavedState | _Held):
        return packed.open()
    return packed.of_value(packed.argument.open()) if isinstance(packed, _View) else packed
