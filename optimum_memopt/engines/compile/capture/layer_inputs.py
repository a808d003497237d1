"""Arguments of a graph's run that its backward reads, and nobody holds until then: offloaded, or recomputed.

Both happen around the graph, whose partition is the same. An offloaded argument is copied while the run computes, and
reloaded while the backward of the next run does. One that is recomputed is returned once more by the run that had
returned it, so that of a segment of layers the input of the first is held (Chen et al. 2016,
https://arxiv.org/abs/1604.06174); hooks on saved tensors leave the model's own loop as it is.
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

from optimum_memopt.compat.torch import without_modes
from optimum_memopt.engines.compile.capture.moved_state import SavedState, StateArgs
from optimum_memopt.engines.compile.partition.choice import InputsPlan
from optimum_memopt.engines.compile.partition.host_copies import offload, reload
from optimum_memopt.engines.compile.torch_compat import dynamo


@dataclass(eq=False)
class _Argument:
    """An argument while nobody holds it.

    Attributes:
        offset: of the tensor that `value` stands for, in its storage.
        saved: how often autograd has saved it or a view of it.
        opened: of those, how many a backward has read.
    """

    offset: int
    saved: int = 0
    opened: int = 0
    value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        raise NotImplementedError

    def open(self) -> torch.Tensor:
        """For the backward, which holds it from the last time on."""
        value = self.get()
        self.opened += 1
        if self.opened == self.saved:
            self.opened, self.value = 0, None
        return value


class _View(NamedTuple):
    """A tensor that lies in an argument."""

    argument: _Argument
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, argument: _Argument) -> "_View":
        return cls(argument, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - argument.offset)

    def of_value(self, value: torch.Tensor) -> torch.Tensor:
        return value.as_strided(self.shape, self.strides, value.storage_offset() + self.offset)


@dataclass(eq=False, kw_only=True)
class _Offloaded(_Argument):
    """Waits on the host; `before` is that of an earlier run, whose backward comes next."""

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
    """States of random generators: of the CPU, and of devices."""

    cpu: torch.Tensor
    devices: list[int]
    states: list[torch.Tensor]

    @classmethod
    def now(cls, args: Sequence[Any]) -> "_Random":
        return cls(torch.get_rng_state(), *get_device_states(*args))

    def is_equal(self, other: "_Random") -> bool:
        pairs = zip((self.cpu, *self.states), (other.cpu, *other.states), strict=True)
        # The states are real where the forward runs on fake tensors.
        with without_modes():
            return all(itertools.starmap(torch.equal, pairs))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within it generators draw the same numbers again."""
        kind = torch.accelerator.current_accelerator() if self.devices else None
        kind_name = kind.type if kind is not None else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind_name):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states, device_type=kind_name)
            yield


@dataclass(eq=False)
class _Repeated:
    """A run that a backward runs again.

    Attributes:
        args: those that are not held are views.
        gathered: around it, has the parameters among them.
        random: the states before it; None: it draws nothing.
        results: those that are arguments of others, by their places.
    """

    run: Callable[..., Any]
    args: Sequence[Any]
    gathered: Callable[[], contextlib.AbstractContextManager[None]]
    random: _Random | None
    results: "weakref.WeakValueDictionary[int, _Recomputed]" = field(default_factory=weakref.WeakValueDictionary)

    def again(self) -> None:
        """Set the values of its results."""
        args = [arg.of_value(arg.argument.get()) if isinstance(arg, _View) else arg for arg in self.args]
        with self.gathered(), contextlib.nullcontext() if self.random is None else self.random.again():
            # Without gradients, so that nothing holds what it saves.
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


class LayerInputs:
    """The runs of one forward whose arguments are offloaded or recomputed, and those that run again."""

    def __init__(self) -> None:
        self._last: _Offloaded | None = None
        # By storage the run that has returned it, the place among its results, the offset there, and what keeps
        # another storage from having its address.
        self._returned: dict[int, tuple[_Repeated, int, int, dynamo.StorageWeakRef]] = {}

    def possible(self, plan: InputsPlan, args: Sequence[Any]) -> InputsPlan:
        """The part of a plan that holds for these arguments: what a hook has changed on its way is no run's result."""
        known = {at for at in plan.recomputed if dynamo.storage_id(args[at]) in self._returned}
        return plan if known == plan.recomputed else replace(plan, recomputed=frozenset(known))

    def run(
        self,
        run: Callable[..., Any],
        plan: InputsPlan,
        gathered: Callable[[], contextlib.AbstractContextManager[None]],
        state: StateArgs,
    ) -> Any:
        """The results of a run.

        Args:
            gathered: around one in a backward, has the parameters among its arguments.
        """
        # autograd holds `pack` as long as what it has saved: it must hold no arguments.
        args, saved_state = state.args, state.saved
        arguments: dict[int, _Argument] = {}
        # Not in the forward's autograd graph.
        offloaded = {place: args[place].detach() for place in sorted(plan.offloaded)}
        for given in offloaded.values():
            self._last = _Offloaded(
                int(given.storage_offset()), host=offload(given), device=given.device, before=self._last
            )
            arguments[dynamo.storage_id(given)] = self._last
        for place in sorted(plan.recomputed):
            source, at, offset, _ = self._returned[storage := dynamo.storage_id(args[place])]
            arguments[storage] = source.results.setdefault(at, _Recomputed(offset, source=source))

        def unless_held(value: Any) -> Any:
            argument = arguments.get(dynamo.storage_id(value)) if isinstance(value, torch.Tensor) else None
            return value if argument is None else _View.of(value, argument)

        def pack(saved: torch.Tensor) -> torch.Tensor | _View | SavedState:
            if saved_state is not None and (of_state := saved_state(saved)) is not None:
                return of_state
            packed = unless_held(saved)
            if isinstance(packed, _View):
                packed.argument.saved += 1
                return packed
            # ZeRO 3 takes a parameter's data away, and gives it others.
            return saved if isinstance(saved, torch.nn.Parameter) else saved.detach()

        random = _Random.now(args) if plan.is_repeated else None
        with saved_tensors_hooks(pack, _unpacked):
            results = run(*args)
        for given in offloaded.values():
            argument = arguments[dynamo.storage_id(given)]
            assert isinstance(argument, _Offloaded)
            torch.ops.optimum_memopt.wait(argument.host, given, [])
        if random is not None:
            is_drawn = not random.is_equal(_Random.now(args))
            held = [arg.clone() if at in state.copied else unless_held(arg) for at, arg in enumerate(args)]
            repeated = _Repeated(run, held, gathered, random if is_drawn else None)
            for at, result in enumerate(listed(results)):
                if isinstance(result, torch.Tensor):
                    alive = dynamo.StorageWeakRef(result.untyped_storage())
                    self._returned[dynamo.storage_id(result)] = repeated, at, int(result.storage_offset()), alive
        return results


def listed(results: Any) -> Sequence[Any]:
    """The results of a run, of which there may be one."""
    return results if isinstance(results, tuple | list) else [results]


def _unpacked(packed: torch.Tensor | _View | SavedState) -> torch.Tensor:
    if isinstance(packed, SavedState):
        return packed.open()
    return packed.of_value(packed.argument.open()) if isinstance(packed, _View) else packed
