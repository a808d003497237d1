"""Simulates ZeRO 3's gathers of parameters and reductions of gradients while a step runs on fake tensors.

Follows DeepSpeed 0.19 (`partitioned_param_coordinator.py` and `stage3.py` in `runtime/zero/`). The first step records
the order in which modules run; later steps gather ahead in that order.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from optimum_memopt.engines.torch_compat.zero3 import PartitionedParameter, Partitioning


@dataclass(eq=False)
class ParameterState:
    """A partitioned parameter during a step.

    Attributes:
        is_there: whether it is gathered.
        used_by: running modules that need it gathered.
        last: index in the module order of the last use that it was gathered for.
    """

    tensor: torch.nn.Parameter
    spec: PartitionedParameter
    is_there: bool = False
    used_by: set[torch.nn.Module] = field(default_factory=set)
    last: int = -(2**62)

    @property
    def elements(self) -> int:
        return self.spec.shape.numel()


@dataclass(eq=False)
class _Gather:
    """A gather in flight.

    Attributes:
        buffers: flat results, copied to the parameters once the first one is waited for; empty: no copy is needed.
    """

    parameters: Sequence[ParameterState]
    buffers: list[torch.Tensor] = field(default_factory=list)
    has_come: bool = False


class Gathering:
    """Gathers and releases the parameters of one step.

    Args:
        leafs: leaf modules, which are gathered with all modules in them.
        order: modules in the order of their forwards and backwards; None: record it, and gather nothing ahead.

    Attributes:
        order: `order`, or the modules that have run so far.
        own: each module's direct parameters; `inside` includes those of its submodules.
        whole: full data of each parameter, used instead of a gather if there is only one rank; else empty.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        partitioning: Partitioning,
        leafs: Collection[torch.nn.Module],
        order: Sequence[torch.nn.Module] | None,
    ) -> None:
        self.spec, self._leafs = partitioning, set(leafs)
        held: dict[torch.nn.Parameter, ParameterState] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter not in held:
                held[parameter] = ParameterState(parameter, partitioning.parameters[name])
        self._all = list(held.values())
        self.whole = {} if partitioning.ranks > 1 else {each: each.tensor.data for each in self._all}
        self.own = {module: [held[each] for each in module.parameters(recurse=False)] for module in model.modules()}
        self.inside = {module: [held[each] for each in module.parameters()] for module in model.modules()}
        self._is_known = order is not None
        self.order: list[torch.nn.Module] = list(order or ())
        uses = ((each, place) for place, module in enumerate(self.order) for each in self._of(module))
        self._queue = deque(uses)
        self._flying: dict[ParameterState, _Gather] = {}
        self._step = self._gathered = 0
        self._in_backward: dict[torch.nn.Module, None] = {}

    def _by_module(self, module: torch.nn.Module) -> Mapping[torch.nn.Module, list[ParameterState]]:
        """Returns the parameters of all modules, as counted for this one: a leaf's include those of submodules."""
        return self.inside if module in self._leafs else self.own

    def _of(self, module: torch.nn.Module) -> list[ParameterState]:
        return sorted(set(self._by_module(module)[module]), key=lambda held: held.spec.order)

    def begin(self) -> None:
        """Start a step: only persistent parameters are gathered, from the second step on."""
        for held in self._all:
            held.tensor.data = held.tensor.new_empty(0)
            if held.spec.is_persistent and self._is_known:
                self._gather_alone(held)
                held.is_there = True

    def fetch(self, module: torch.nn.Module, in_backward: bool = False) -> None:
        """Gather the parameters that a module is about to read, and later ones ahead."""
        if in_backward:
            self._in_backward[module] = None
        wanted = self._of(module)
        self._gather([held for held in wanted if not held.is_there and held not in self._flying])
        for held in wanted:
            held.used_by.add(module)
            self._wait(held)
        if not self._is_known:
            self.order.append(module)
            return
        new = sum(held.last < self._step for held in wanted)
        passed: set[ParameterState] = set()
        while self._queue and len(passed) < new:
            held, held.last = self._queue.popleft()
            passed.add(held)
        ahead: list[ParameterState] = []
        count, most = 0, min(self.spec.live - self._gathered, self.spec.prefetched)
        while self._queue and count < most:
            held, place = self._queue.popleft()
            held.last = max(held.last, place)
            if not held.is_there and held not in self._flying and held not in ahead:
                ahead.append(held)
                count += held.elements
        self._gather(ahead)
        self._step += 1

    def release(self, module: torch.nn.Module, in_backward: bool = False) -> None:
        """Release a module's parameters after use, except those that are read again soon."""
        if in_backward:
            self._in_backward.pop(module, None)
        kept = self._kept(module) if self._is_known else ()
        for held in self._of(module):
            held.used_by.discard(module)
            if held not in kept:
                self._release(held)

    def end(self) -> None:
        """End the backward: release the parameters of modules whose inputs require no gradient."""
        for module in reversed(self._in_backward):
            for held in self._of(module):
                held.used_by.discard(module)
                if not held.spec.is_persistent:
                    self._release(held)

    def _kept(self, module: torch.nn.Module) -> set[ParameterState]:
        """Returns parameters that a module's release keeps, since they are persistent or read again soon."""
        kept = {held for held in self._of(module) if held.spec.is_persistent or held.last > self._step}
        passed = 0
        by_module = self._by_module(module)
        for later in self.order[self._step :]:
            if passed >= self.spec.reuse:
                break
            kept.update(by_module[later])
            passed += sum(held.elements for held in by_module[later])
        return kept

    def _gather(self, parameters: Sequence[ParameterState]) -> None:
        self._gathered += sum(held.elements for held in parameters)
        ordered = sorted(parameters, key=lambda held: held.spec.order)
        if self.whole:
            for held in ordered:
                held.tensor.data = self.whole[held]
            self._flying.update((held, _Gather([held])) for held in ordered)
            return
        if len(ordered) == 1:
            self._gather_alone(ordered[0])
            self._flying[ordered[0]] = _Gather(ordered)
            return
        elements: dict[torch.dtype, int] = {}
        for held in ordered:
            elements[held.spec.dtype] = elements.get(held.spec.dtype, 0) + held.spec.share * self.spec.ranks
        flat = _Gather(ordered, [ordered[0].tensor.new_empty(size, dtype=dtype) for dtype, size in elements.items()])
        self._flying.update(dict.fromkeys(ordered, flat))

    def _gather_alone(self, held: ParameterState) -> None:
        """Gather one parameter: its data is a view of the gathered buffer, whose end is padding."""
        buffer = held.tensor.new_empty(held.spec.share * self.spec.ranks)
        held.tensor.data = buffer[: held.elements].view(held.spec.shape)

    def _wait(self, held: ParameterState) -> None:
        flat = self._flying.pop(held, None)
        if flat is None or flat.has_come:
            return
        flat.has_come = True
        for each in flat.parameters:
            each.is_there = True
            if flat.buffers:
                each.tensor.data = each.tensor.new_empty(each.spec.shape)

    def _release(self, held: ParameterState) -> None:
        if held.is_there and not held.used_by:
            held.tensor.data, held.is_there = held.tensor.new_empty(0), False
            self._gathered -= held.elements


class Reduction:
    """Reduces gradients in buckets."""

    def __init__(self, partitioning: Partitioning) -> None:
        self._spec = partitioning
        self._waiting: list[tuple[PartitionedParameter, torch.Tensor | None]] = []
        self._elements = 0

    def add(self, held: ParameterState) -> None:
        """Move a parameter's gradient to the bucket, which is reduced first if it would overflow."""
        spec, gradient, held.tensor.grad = held.spec, held.tensor.grad, None
        size = held.elements
        if self._waiting and self._elements + size > self._spec.bucket:
            self.reduce(held.tensor)
        # A gradient that fits is copied to the bucket's buffer, which always exists; others are kept.
        has_room = self._elements + size <= self._spec.bucket
        self._waiting.append((spec, None if has_room else gradient))
        self._elements += size

    def reduce(self, like: torch.Tensor) -> None:
        """Reduce the bucket; buffers are allocated on the device of `like`."""
        if not self._waiting:
            return
        spec, ((first, _), *more) = self._spec, self._waiting
        held = []
        if spec.reduced is not spec.computed:
            held += [like.new_empty(each.shape, dtype=spec.reduced) for each, _ in self._waiting]
        share = sum(each.share for each, _ in self._waiting)
        if more or first.shape.numel() % spec.ranks:
            held.append(like.new_empty(share * spec.ranks, dtype=spec.reduced))
        if spec.reduced is not spec.accumulated:
            held.append(like.new_empty(share, dtype=spec.accumulated))
        self._waiting.clear()
        self._elements = 0
