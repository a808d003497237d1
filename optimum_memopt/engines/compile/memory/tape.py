"""A forward as the runs of its graphs, one after the other, and the storages that pass between them. Pure.

Each graph's events are exact by themselves. Composed over the tape a storage that one graph returns and others read
or save is held once, until the last of them is done, and a gradient that a backward returns is the one that the
backward before it is given. One graph is a tape of one.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import sympy
import torch

from optimum_memopt.engines.api.predictions import RECOMPUTED, SAVED, TEMPORARY
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.events import Event, GraphEvents, Schedule, Storage, bytes_during
from optimum_memopt.engines.compile.memory.sharding import AnySharding, Collectives, Reduced, Sharding
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.autograd import OutsideOperator, order_of, outside_operators
from optimum_memopt.engines.compile.torch_compat.fully_shard import ShardedGroup


@dataclass(frozen=True)
class Call:
    """One run of a graph. Storages are numbered.

    Attributes:
        graph: which of the forward's graphs runs.
        inputs: the storage of each argument that is a tensor, by its position.
        outputs: that of each result.
        released: storages that nobody holds any more when the next graph runs.
        sizes: shapes of the arguments that are tensors and no parameters, and of a number itself.
        layer: the path of the layer whose forward it is; empty: of no layer that was compiled by itself.
        turn: how often the same graph has run for that layer, or for none, earlier in the forward.
        parameters: names of arguments in the model, by position; of equal layers that of the first.
        offloaded: positions of arguments that wait for its backward on the host.
        recomputed: those that are computed again for it, by the run that had returned them.
    """

    graph: int
    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    released: frozenset[int] = frozenset()
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    layer: str = ""
    turn: int = 0
    parameters: Mapping[int, str] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()


class Tensor(NamedTuple):
    """A tensor outside of all graphs.

    Attributes:
        storage: its number, of a gradient one among the gradients.
        shape: of the tensor.
        bytes: of the storage.
    """

    storage: int
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Outside:
    """An operator that autograd runs outside of all graphs.

    Attributes:
        name: of its backward.
        call: the last one before it in the forward; -1: none.
        saved: what it saves.
        workspace: as large as what its backward holds while it runs; None: that holds nothing.
        allocates: gradients that its backward computes.
        frees: gradients that nothing reads behind it.
        passed: gradients that are those of a graph's result, with the storage of that.
    """

    name: str
    call: int
    saved: tuple[Tensor, ...]
    workspace: Tensor | None
    allocates: tuple[Tensor, ...]
    frees: tuple[int, ...]
    passed: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tape:
    """The runs of a forward.

    Attributes:
        calls: in order.
        given: storages that were there before: the forward's own arguments, and parameters.
        outside: what runs outside of all graphs, in the order of the backward.
        sharding: of the model.
    """

    calls: tuple[Call, ...]
    given: frozenset[int] = frozenset()
    outside: tuple[Outside, ...] = ()
    sharding: AnySharding = field(default_factory=Sharding)

    def collectives(self, gradients: Sequence[Collection[int]]) -> Collectives:
        """The events around its calls; see `sharding.collectives`."""
        layers, parameters = [call.layer for call in self.calls], [call.parameters for call in self.calls]
        return self.sharding.collectives(layers, parameters, gradients)

    def at(self, sizes: Mapping[str, int]) -> "Tape":
        """With what is around its calls for a batch of these sizes; see `AnySharding.at`."""
        return replace(self, sharding=self.sharding.at(sizes))

    def with_all_held(self) -> "Tape":
        """The same where each argument that a backward reads is held until then."""
        calls = (replace(call, offloaded=frozenset(), recomputed=frozenset()) for call in self.calls)
        return replace(self, calls=tuple(calls))

    def under(self, sharding: AnySharding) -> "Tape":
        """The same calls of a model that is sharded so."""
        if not sharding.tells_outside or not self.calls:
            return replace(self, sharding=sharding)
        # What holds the results of the last call is among the events, too.
        last = replace(self.calls[-1], released=frozenset())
        return replace(self, calls=(*self.calls[:-1], last), outside=(), sharding=sharding)

    @classmethod
    def of_one(cls) -> "Tape":
        """One graph that is all of a forward."""
        return cls((Call(0),))

    @property
    def runs(self) -> tuple[int, ...]:
        """How often each graph runs."""
        counts = Counter(call.graph for call in self.calls)
        return tuple(counts[graph] for graph in range(len(counts)))


class TapeRecorder:
    """Notes the runs of a forward's graphs while it runs."""

    def __init__(self) -> None:
        self.begin(())

    def begin(self, arguments: Iterable[object]) -> None:
        """A forward with these arguments begins; what was noted of another one is forgotten."""
        self._calls: list[tuple[Hashable, Call]] = []
        # Of the calls, and of what is saved outside, the place in the order of autograd's operators.
        self._orders: list[int] = []
        self._outside: list[tuple[OutsideOperator, tuple[Tensor, ...], Tensor | None]] = []
        self._numbers = itertools.count()
        # By address, which a storage that is gone may have left to another one.
        self._storages: dict[int, tuple[dynamo.StorageWeakRef, int]] = {}
        self._parameters: dict[int, int] = {}
        self._given = set(self._numbered(list(arguments)).values())

    def before(
        self,
        graph: Hashable,
        arguments: Sequence[object],
        layer: str = "",
        turn: int = 0,
        parameters: Sequence[str] = (),
        offloaded: frozenset[int] = frozenset(),
        recomputed: frozenset[int] = frozenset(),
    ) -> None:
        """A graph is about to run; arguments as in `Call`, `parameters` empty for other arguments."""
        self._note_released()
        names = {place: name for place, name in enumerate(parameters) if name}
        numbers, sizes = self._numbered(arguments), sizes_of(arguments)
        call = Call(0, numbers, {}, frozenset(), sizes, layer, turn, names, offloaded, recomputed)
        self._calls.append((graph, call))

    def after(self, results: Sequence[object]) -> None:
        """The graph that was last about to run has returned."""
        graph, call = self._calls[-1]
        self._calls[-1] = graph, replace(call, outputs=self._numbered(results))
        self._orders.append(order_of(results))

    def end(self, outputs: Iterable[object]) -> None:
        """The forward has returned."""
        self._note_released()
        outputs = list(outputs)
        self._note_saved(set(self._numbered(outputs).values()))
        for operator in outside_operators(outputs):
            saved = tuple(map(self._tensor, operator.saved))
            workspace = None if operator.workspace is None else self._tensor(operator.workspace)
            self._outside.append((replace(operator, saved=(), workspace=None), saved, workspace))

    @property
    def graphs(self) -> tuple[Hashable, ...]:
        """Those that ran, in the order of their runs."""
        return tuple(graph for graph, _ in self._calls)

    def tape(self, graphs: Sequence[Hashable]) -> Tape:
        """The runs of these graphs so far; what others have returned comes from outside."""
        self._note_released()
        numbers = {graph: number for number, graph in enumerate(graphs)}
        calls: list[Call] = []
        orders: list[int] = []
        for (graph, call), order in zip(self._calls, self._orders, strict=False):
            if graph in numbers:
                calls.append(replace(call, graph=numbers[graph]))
                orders.append(order)
            elif calls:
                calls[-1] = replace(calls[-1], released=calls[-1].released | call.released)
        given = frozenset({*self._given, *self._parameters.values()})
        outside = tuple(_outside(*operator, calls, orders, given) for operator in self._outside)
        return Tape(tuple(calls), given, outside)

    def _note_released(self) -> None:
        gone = [address for address, (storage, _) in self._storages.items() if storage.expired()]
        numbers = {self._storages.pop(address)[1] for address in gone}
        if self._calls and numbers:
            graph, call = self._calls[-1]
            self._calls[-1] = graph, replace(call, released=call.released | numbers)

    def _note_saved(self, returned: Collection[int]) -> None:
        """Note as released what only a backward still holds: under another plan it may be gone behind its last use."""
        kept = {*returned, *self._given, *self._parameters.values()}
        last: dict[int, int] = {}
        for index, (_, call) in enumerate(self._calls):
            last.update(dict.fromkeys((*call.inputs.values(), *call.outputs.values()), index))
        for number in last.keys() - kept:
            graph, call = self._calls[last[number]]
            self._calls[last[number]] = graph, replace(call, released=call.released | {number})

    def _numbered(self, values: Sequence[object]) -> dict[int, int]:
        return {place: self._number(tensor) for place, tensor in enumerate(values) if isinstance(tensor, torch.Tensor)}

    def _tensor(self, tensor: torch.Tensor) -> Tensor:
        shape = tuple(map(int, tensor.shape))
        return Tensor(self._number(tensor), shape, tensor.untyped_storage().nbytes())

    def _number(self, tensor: torch.Tensor) -> int:
        if isinstance(tensor, torch.nn.Parameter):
            number = self._parameters.setdefault(id(tensor), next(self._numbers))
            # FSDP2 gives a layer views of those that it is called with.
            self._storages[dynamo.storage_id(tensor)] = dynamo.StorageWeakRef(tensor.untyped_storage()), number
            return number
        address = dynamo.storage_id(tensor)
        known = self._storages.get(address)
        if known is None or known[0].expired():
            known = dynamo.StorageWeakRef(tensor.untyped_storage()), next(self._numbers)
            self._storages[address] = known
        return known[1]


def sizes_of(arguments: Sequence[object]) -> dict[int, tuple[int, ...]]:
    """The sizes of a graph's arguments; see `Call`."""
    sizes: dict[int, tuple[int, ...]] = {}
    for place, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and not isinstance(argument, torch.nn.Parameter):
            sizes[place] = tuple(map(int, argument.shape))
        elif type(argument) is int:
            sizes[place] = (argument,)
    return sizes


def _outside(
    operator: OutsideOperator,
    saved: Iterable[Tensor],
    workspace: Tensor | None,
    calls: Sequence[Call],
    orders: Sequence[int],
    given: frozenset[int],
) -> Outside:
    of_call = {order: call for order, call in zip(orders, calls, strict=True) if order >= 0}
    results = ((number, of_call[order].outputs.get(at)) for number, order, at in operator.passed if order in of_call)
    return Outside(
        operator.name,
        sum(0 <= order < operator.order for order in orders) - 1,
        tuple(tensor for tensor in saved if tensor.storage not in given),
        workspace,
        tuple(Tensor(storage.number, storage.shape, storage.bytes) for storage in operator.allocates),
        operator.frees,
        tuple((number, result) for number, result in results if result is not None),
    )


def resized(
    tape: Tape, schedules: Sequence[Schedule], first: Sequence[SymbolValues], named: Sequence[SymbolValues]
) -> tuple[Tape, list[dict[sympy.Symbol, int]]]:
    """The tape for another batch, and the sizes of each call.

    A size of an argument is that of the result that it was, which follows from the sizes of the graph that returned
    it. Else it has a name; else it is as many times as large as a size that was equal in the first batch.

    Args:
        tape: of the first batch.
        schedules: of its graphs.
        first: the symbols' values in the first batch, of each graph.
        named: those of the symbols that have names, in this batch.
    """
    sizes: list[dict[sympy.Symbol, int]] = []
    results: list[_Shape] = []
    for call in tape.calls:
        schedule, traced = schedules[call.graph], first[call.graph]
        before = {**traced, **schedule.values(call.sizes)}
        passed: dict[sympy.Symbol, int] = {}
        old = schedule.shapes(before)[0]
        for position in old.keys() & call.inputs.keys():
            argument = call.inputs[position], old[position]
            same = [shape.now for shape in results if (shape.storage, shape.before) == argument]
            passed.update(zip(schedule.inputs[position], same[-1], strict=True) if same else ())
        values = {symbol: _grown(size, results) for symbol, size in before.items()}
        # The graph may run for another length, too, than the one that its sizes are named by.
        values |= {symbol: size for symbol, size in named[call.graph].items() if before[symbol] == traced[symbol]}
        values |= {symbol: size for symbol, size in passed.items() if symbol in before}
        sizes.append(values)
        for numbers, shapes, now in zip(
            (call.inputs, call.outputs), schedule.shapes(before), schedule.shapes(values), strict=True
        ):
            results += [_Shape(numbers[at], shapes[at], now[at]) for at in shapes if at in numbers]

    def grown(tensor: Tensor) -> Tensor:
        return tensor._replace(bytes=_grown_bytes(tensor, results))

    outside = (
        replace(
            operator,
            saved=tuple(map(grown, operator.saved)),
            workspace=None if operator.workspace is None else grown(operator.workspace),
            allocates=tuple(map(grown, operator.allocates)),
        )
        for operator in tape.outside
    )
    return replace(tape, outside=tuple(outside)), sizes


class _Shape(NamedTuple):
    """A tensor that a graph was given, or returned.

    Attributes:
        storage: its number.
        before: its shape on the tape.
        now: that in another batch.
    """

    storage: int
    before: tuple[int, ...]
    now: tuple[int, ...]


def _grown(size: int, shapes: Sequence[_Shape], place: int | None = None) -> int:
    """A size without a name, by one that was equal to it and is another now, if any in the same place of a shape."""
    equal = [
        (at != place, new)
        for shape in shapes
        for at, (old, new) in enumerate(zip(shape.before, shape.now, strict=True))
        if old == size != new
    ]
    return min(equal, key=lambda match: match[0], default=(False, size))[1]


def _grown_bytes(tensor: Tensor, shapes: Sequence[_Shape]) -> int:
    """The size of what is outside of all graphs, by the shape that begins as its own does."""

    def common(shape: _Shape) -> int:
        pairs = zip(shape.before, tensor.shape, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    nearest = max(shapes, key=common, default=None)
    kept = nearest.now[: common(nearest)] if nearest is not None else ()
    rest = (_grown(size, shapes, place) for place, size in enumerate(tensor.shape) if place >= len(kept))
    return tensor.bytes * math.prod((*kept, *rest)) // max(1, math.prod(tensor.shape))


@dataclass(frozen=True)
class StepEvents:
    """The events of a forward and its backward; those without an operator are what happens between two.

    Attributes:
        forward: of all graphs.
        between: what the caller drops, and the gradients that it hands back.
        backward: of all graphs.
    """

    forward: tuple[Event, ...]
    between: tuple[Event, Event]
    backward: tuple[Event, ...]

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return (*self.forward, *self.between, *self.backward)

    @property
    def saved_bytes(self) -> int:
        """Held between forward and backward."""
        return bytes_during((*self.forward, self.between[0]))[1]

    def peak(self, gradients: int = 0) -> int:
        """The most that is held.

        Args:
            gradients: bytes that are there when the backward begins, and not yet in the forward.
        """
        during, _ = bytes_during(self.events)
        count = len(self.forward) + 1
        return max(*during[:count], *(size + gradients for size in during[count:]))


def interpolated(low: StepEvents, high: StepEvents, share: float) -> StepEvents | None:
    """The step whose storages are by a share of the difference larger than those of `low`; the share may be negative
    or over 1. None where the two steps are not the same operators."""

    def size(first: int, second: int) -> int:
        return max(0, round(first + share * (second - first)))

    def event(first: Event, second: Event) -> Event:
        storages = zip(first.allocates, second.allocates, strict=True)
        return first._replace(
            allocates=tuple(one._replace(bytes=size(one.bytes, other.bytes)) for one, other in storages),
            workspace=size(first.workspace, second.workspace),
        )

    pairs = list(zip(low.events, high.events, strict=False))
    if len(low.events) != len(high.events) or len(low.forward) != len(high.forward):
        return None
    if any(one.kind != other.kind or len(one.allocates) != len(other.allocates) for one, other in pairs):
        return None
    events, count = tuple(itertools.starmap(event, pairs)), len(low.forward)
    return StepEvents(events[:count], (events[count], events[count + 1]), events[count + 2 :])


def compose(tape: Tape, runs: Sequence[GraphEvents], accumulates: bool = False) -> StepEvents:
    """The events of a step whose forward is the tape.

    Args:
        runs: those of each call.
        accumulates: gradients of parameters are added to others as soon as a graph's backward returns them.
    """
    composition = _Composition(tape, runs, accumulates)
    count, around = len(tape.calls), composition.collectives
    forward = [event for index in range(count) for event in composition.forward(index)]
    dropped = composition.drop_results()
    backward = list(composition.backward(count - 1))
    given = backward.pop(0)
    for index in reversed(range(count - 1)):
        backward += composition.backward(index)
    backward = [*around.prefetched, *backward, *composition.reduced(around.last), *around.end]
    return StepEvents((*forward, *around.end_of_forward), (dropped, given), tuple(backward))


def bytes_left_by(tape: Tape, runs: Sequence[GraphEvents], count: int) -> int:
    """Bytes that the first calls of a tape have left when the next graph begins, with what is gathered for that."""
    composition = _Composition(tape, runs)
    events = [event for index in range(count) for event in composition.forward(index)]
    events += itertools.chain(*composition.collectives.before[count : count + 1])
    return bytes_during(events)[1]


class _Composition:
    """The names of storages in a step, and who holds those that pass between graphs."""

    def __init__(self, tape: Tape, runs: Sequence[GraphEvents], accumulates: bool = False) -> None:
        self._calls, self._given, self._graphs, self._accumulates = tape.calls, tape.given, runs, accumulates
        # By run: names in the step of what its forward is given, returns and saves.
        self._names = [self._names_of(index) for index in range(len(self._calls))]
        # By run, what of that its backward reads in a storage of its own; and what is held for one that runs again.
        self._later = [self._later_of(index) for index in range(len(self._calls))]
        self._kept: dict[int, set[str]] = {}
        # Of storages that pass between graphs: runs whose backward needs them.
        self._readers: dict[str, set[int]] = {}
        for index, (graph, names) in enumerate(zip(self._graphs, self._names, strict=True)):
            names = names | {local: storage.name for local, storage in self._later[index].items()}
            for local in (*(storage.name for storage in graph.saved), *graph.saved_inputs):
                if local in names:
                    self._readers.setdefault(names[local], set()).add(index)
            for position in self._calls[index].recomputed:
                again = self._returned_by(index, position)
                later = self._later[again]
                kept = {name for local, name in self._names[again].items() if local not in later}
                self._kept.setdefault(index, set()).update(kept - self._outputs_of(again))
        for index, kept in self._kept.items():
            for name in kept:
                self._readers.setdefault(name, set()).add(index)
        # What runs between graphs; in the place of a call that reads a storage its number from -1 down.
        self._outside = [(-1 - number, operator) for number, operator in enumerate(tape.outside)]
        for reader, operator in self._outside:
            for tensor in operator.saved:
                self._readers.setdefault(_shared(tensor.storage), set()).add(reader)
        self._held: set[str] = set()
        # The caller's, until it drops them, in order.
        self._of_caller: dict[str, None] = {}
        # By number of a storage or parameter its gradient, and for how many backwards a gradient still waits.
        self._gradients: dict[int, str] = {}
        self._waiting: Counter[str] = Counter()
        # Gradients that only an operator outside of all graphs reads.
        self._passed: list[str] = []
        returned = [[at for at, _ in graph.gradients if at is not None] for graph in runs]
        self.collectives = tape.collectives(returned)
        # Gradients that go when a group's are reduced, and those of them that a backward was given.
        self._sharded: dict[str, ShardedGroup] = {}
        self._lent: set[str] = set()

    def _names_of(self, index: int) -> dict[str, str]:
        graph, call = self._graphs[index], self._calls[index]
        names: dict[str, str] = {}
        for position, storage in graph.inputs.items():
            number = call.inputs.get(position)
            if number is not None and number not in self._given:
                names[storage.name] = _shared(number)
        for place, name in graph.outputs:
            returned = None if place is None else call.outputs.get(place)
            # What is written back to an input is copied there, and is a storage of its own until then.
            if name and returned is not None and returned not in {*self._given, *call.inputs.values()}:
                names.setdefault(name, _shared(returned))
        return names

    def _later_of(self, index: int) -> dict[str, Storage]:
        """The arguments of a run that are offloaded or recomputed, as its backward finds them; by their own names."""
        call, inputs = self._calls[index], self._graphs[index].inputs
        places = {
            place: RECOMPUTED if place in call.recomputed else SAVED for place in call.offloaded | call.recomputed
        }
        return {
            inputs[place].name: inputs[place]._replace(
                name=f"{_shared(call.inputs[place])} for {index}", category=category, layer=call.layer
            )
            for place, category in places.items()
            if place in inputs
        }

    def _returned_by(self, index: int, position: int) -> int:
        """The run that has returned an argument of a later one."""
        number = self._calls[index].inputs[position]
        return next(at for at in reversed(range(index)) if number in self._calls[at].outputs.values())

    def _outputs_of(self, index: int) -> set[str]:
        return set(map(_shared, self._calls[index].outputs.values()))

    def forward(self, index: int) -> Iterator[Event]:
        """The events of a run; before it what comes from outside of all graphs, behind it what is released."""
        graph, names = self._graphs[index], self._names[index]
        yield from self.collectives.before[index]
        given = [self._renamed(index, storage) for storage in graph.inputs.values() if storage.name in names]
        if not index:
            yield from self._saved_outside(-1)
        outside = {storage.name: storage for storage in given if storage.name not in self._held}
        if outside:
            yield Event("", allocates=tuple(outside.values()))
        self._held |= outside.keys()
        for event in graph.forward:
            allocates = tuple(self._renamed(index, storage) for storage in event.allocates)
            self._held.update(storage.name for storage in allocates)
            frees = tuple(self._name(index, name) for name in event.frees)
            yield event._replace(layer=self._layer(index, event.layer), allocates=allocates, frees=frees)
        returned = [self._name(index, name) for name in graph.returned]
        self._of_caller.update((name, None) for name in (*names.values(), *returned) if name in self._held)
        yield from self._saved_outside(index)
        yield from self.collectives.after[index]
        if index < len(self._calls) - 1:
            passed = set(names.values())
            # What the caller does not get was written back to an input.
            dropped = [name for name in returned if name not in passed]
            released = [_shared(number) for number in sorted(self._calls[index].released)]
            if frees := self._dropped([*dropped, *released]):
                yield Event("", frees=frees)

    def _saved_outside(self, call: int) -> Iterator[Event]:
        """The storages that operators behind a call save, where no graph has allocated it."""
        behind = (operator for _, operator in self._outside if operator.call == call)
        saved = {_shared(tensor.storage): tensor.bytes for operator in behind for tensor in operator.saved}
        new = tuple(Storage(name, size, SAVED, _BETWEEN) for name, size in saved.items() if name not in self._held)
        self._held |= saved.keys()
        if new:
            yield Event("", allocates=new)

    def drop_results(self) -> Event:
        """The storages that the forward's caller drops: Trainer keeps the loss alone."""
        return Event("", frees=self._dropped([*self._of_caller]))

    def backward(self, index: int) -> Iterator[Event]:
        """The events of a run's backward; before it gradients that no graph returns, behind it what is summed."""
        graph, call = self._graphs[index], self._calls[index]
        names = {storage.name: self._name(index, storage.name) for storage in graph.saved}
        names |= {name: self._names[index].get(name, "") for name in graph.saved_inputs}
        names |= {name: storage.name for name, storage in self._later[index].items()}
        needed = [name for name in names.values() if index in self._readers.get(name, ())]
        behind = [entry for entry in self._outside if entry[1].call == index]
        outside = [*self._backward_outside(behind), *self.collectives.outside[index]]
        if outside:
            yield Event("")
            yield from outside
        tangents = []
        for position, storage in graph.tangents:
            number = -1 if position is None else call.outputs.get(position, -1)
            if number in self._gradients:
                names[storage.name] = self._gradients.pop(number)
                self._waiting[names[storage.name]] -= 1
            else:
                names[storage.name] = f"{index} {storage.name}"
                tangents.append(storage._replace(name=names[storage.name]))
            if (group := self.collectives.given[index]) is not None:
                self._sharded[names[storage.name]] = group
                self._waiting[names[storage.name]] += 1
                self._lent.add(names[storage.name])
        yield Event("", allocates=tuple(tangents), frees=tuple(self._passed))
        self._passed = []
        yield from self.collectives.before_backward[index]
        yield from self._reloaded(index)
        yield from self._recomputed(index)
        for event in graph.backward:
            allocates = tuple(
                storage._replace(name=f"{index} {storage.name}", layer=self._layer(index, storage.layer))
                for storage in event.allocates
            )
            done = [names.get(name, f"{index} {name}") for name in event.frees]
            done = [name for name in done if self._is_last(index, name)]
            yield event._replace(layer=self._layer(index, event.layer), allocates=allocates, frees=tuple(done))
        returned = {names.get(name, f"{index} {name}") for _, name in graph.gradients}
        needed += self._kept.get(index, ())
        unread = [name for name in needed if name not in returned and index in self._readers[name]]
        frees = [name for name in unread if self._is_last(index, name)]
        if frees := [*frees, *self._summed(index, names)]:
            yield Event("", frees=tuple(frees))
        yield from self.reduced(self.collectives.reduced[index])

    def _reloaded(self, index: int) -> Iterator[Event]:
        """The reloads of what a run's backward reads, and of what the one behind it will."""
        if not self._calls[index].offloaded:
            return
        before = next((at for at in reversed(range(index)) if self._calls[at].offloaded), index)
        for at in dict.fromkeys((index, before)):
            places = (self._graphs[at].inputs[place].name for place in self._calls[at].offloaded)
            storages = [self._later[at][name] for name in places if name in self._later[at]]
            if new := tuple(storage for storage in storages if storage.name not in self._held):
                self._held.update(storage.name for storage in new)
                yield Event(f"{new[0].name} reloaded", "reload", self._calls[at].layer, new)

    def _recomputed(self, index: int) -> Iterator[Event]:
        """The runs that compute again what a run's backward reads, from the first whose arguments are there."""
        later = {self._later[index][self._graphs[index].inputs[at].name].name for at in self._calls[index].recomputed}
        if later <= self._held:
            return
        for at in sorted({self._returned_by(index, position) for position in self._calls[index].recomputed}):
            yield from self._recomputed(at)
            yield from self._again(at)

    def _again(self, index: int) -> Iterator[Event]:
        """The forward of a run once more; of its results those are held that backwards read."""
        graph, call, held = self._graphs[index], self._calls[index], set[str]()
        numbers = {name: call.outputs.get(place, -1) for place, name in graph.outputs if place is not None}
        wanted = {
            name: self._later[at][self._graphs[at].inputs[place].name]
            for name, number in numbers.items()
            for at in range(index + 1, len(self._calls))
            for place in self._calls[at].recomputed
            if self._calls[at].inputs[place] == number
        }
        for event in graph.forward:
            named = (
                wanted.get(storage.name) or storage._replace(name=f"{index} again {storage.name}")
                for storage in event.allocates
            )
            allocates = tuple(storage._replace(category=RECOMPUTED, layer=call.layer) for storage in named)
            frees = tuple(f"{index} again {name}" for name in event.frees)
            held = held.union(storage.name for storage in allocates).difference(frees)
            yield event._replace(layer=call.layer, allocates=allocates, frees=frees)
        left = {storage.name for storage in wanted.values()}
        self._held |= left
        yield Event("", frees=tuple(sorted(held - left)))

    def reduced(self, groups: Iterable[Reduced]) -> Iterator[Event]:
        """The ends of the backwards of sharded groups."""
        for group in groups:
            gradients = [name for name, owner in self._sharded.items() if owner is group.group]
            for name in gradients:
                del self._sharded[name]
            self._waiting.subtract(self._lent.intersection(gradients))
            self._lent.difference_update(gradients)
            freed = tuple(name for name in gradients if not self._waiting[name])
            yield from (group.before, group.copied._replace(frees=freed), group.after)

    def _backward_outside(self, operators: Iterable[tuple[int, Outside]]) -> Iterator[Event]:
        """The backwards of operators between two calls."""
        for reader, operator in operators:
            allocates = tuple(
                Storage(_gradient(tensor.storage), tensor.bytes, TEMPORARY, _BETWEEN) for tensor in operator.allocates
            )
            done = [_shared(tensor.storage) for tensor in operator.saved]
            done = [name for name in dict.fromkeys(done) if self._is_last(reader, name)]
            frees = (*map(_gradient, operator.frees), *done)
            workspace = operator.workspace.bytes if operator.workspace is not None else 0
            yield Event(operator.name, operator.name, "", allocates, workspace, frees)
            for number, result in operator.passed:
                self._gradients.setdefault(result, _gradient(number))
                self._waiting[_gradient(number)] += 1

    def _summed(self, index: int, names: Mapping[str, str]) -> Iterator[str]:
        """Gradients that autograd adds to another one of the same tensor, which was there before."""
        call, graph = self._calls[index], self._graphs[index]
        returned = {number for earlier in self._calls[:index] for number in earlier.outputs.values()}
        for position, local in graph.gradients:
            number = None if position is None else call.inputs.get(position)
            if not local:
                continue
            name = names.get(local, f"{index} {local}")
            owner = None if position is None else self.collectives.owners[index].get(position)
            if number is None and self._accumulates and owner is None:
                yield name
            if number is None:
                continue
            if owner is not None:
                if (first := self._gradients.setdefault(number, name)) == name:
                    self._sharded[name] = owner
                else:
                    yield name
            elif self._accumulates and number in self._given:
                # autograd adds up those of all graphs before it adds them to what is there.
                first = self._gradients.setdefault(number, name)
                if first != name:
                    yield name
                if not any(number in earlier.inputs.values() for earlier in self._calls[:index]):
                    yield first
            elif number not in self._gradients:
                self._gradients[number] = name
                if number in returned or number in self._given:
                    self._waiting[name] += 1
                elif index:
                    self._passed.append(name)
            elif self._gradients[number] != name and not self._waiting[name]:
                yield name

    def _is_last(self, index: int, name: str) -> bool:
        """True where nobody holds a storage any more when a run's backward is done with it."""
        if (readers := self._readers.get(name)) is not None:
            readers.discard(index)
            return not readers
        return bool(name) and not self._waiting[name]

    def _dropped(self, names: Iterable[str]) -> tuple[str, ...]:
        dropped = [name for name in names if name in self._of_caller]
        for name in dropped:
            del self._of_caller[name]
        return tuple(name for name in dropped if not self._readers.get(name))

    def _name(self, index: int, local: str) -> str:
        return self._names[index].get(local, f"{index} {local}")

    def _renamed(self, index: int, storage: Storage) -> Storage:
        name, layer = self._name(index, storage.name), self._layer(index, storage.layer)
        category = SAVED if self._readers.get(name) else storage.category
        return storage._replace(name=name, layer=layer, category=category)

    def _layer(self, index: int, layer: str) -> str:
        """The layer that runs, where its graph is that of the first of several equal ones."""
        return (self._calls[index].layer or layer) if layer else ""


# Kind of what operators outside of all graphs hold.
_BETWEEN = "between graphs"


def _shared(number: int) -> str:
    return f"storage {number}"


def _gradient(number: int) -> str:
    return f"gradient {number}"
