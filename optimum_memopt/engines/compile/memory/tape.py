"""A forward as the runs of its graphs, one after the other, and the storages that pass between them. Pure.

One graph is a tape of one.
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

from optimum_memopt.engines.api.predictions import TEMPORARY
from optimum_memopt.engines.api.run import NOTHING_HELD, HeldOutputs
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.around_runs import Collectives, GraphRun, Sharding, Unsharded
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss
from optimum_memopt.engines.compile.memory.events import Event, Schedule, Storage
from optimum_memopt.engines.compile.torch_compat import dynamo
from optimum_memopt.engines.compile.torch_compat.autograd import OutsideOperator, order_of, outside_operators


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
        call_index: how often the same graph has run for that layer, or for none, earlier in the forward.
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
    call_index: int = 0
    parameters: Mapping[int, str] = field(default_factory=dict)
    offloaded: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()


# Kind of what operators outside of all graphs hold.
BETWEEN = "between graphs"


def gradient_name(number: int) -> str:
    """The name among events of a gradient outside of all graphs."""
    return f"gradient {number}"


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

    @property
    def backward(self) -> Event:
        """Its backward; also frees the tensors it saved, unless still referenced."""
        gradients = ((gradient_name(tensor.storage), tensor.bytes) for tensor in self.allocates)
        allocates = tuple(Storage(name, size, TEMPORARY, BETWEEN) for name, size in gradients)
        workspace = self.workspace.bytes if self.workspace is not None else 0
        return Event(self.name, self.name, "", allocates, workspace, tuple(map(gradient_name, self.frees)))


@dataclass(frozen=True)
class Tape:
    """The runs of a forward.

    Attributes:
        calls: in order.
        given: storages that were there before: the forward's own arguments, and parameters.
        outside: what runs outside of all graphs, in the order of the backward.
        sharding: of the model.
        loss: that is computed outside of the forward; None: it is the forward's own.
        held_outputs: of `results`, what the forward's caller holds.
    """

    calls: tuple[Call, ...]
    given: frozenset[int] = frozenset()
    outside: tuple[Outside, ...] = ()
    sharding: Sharding = field(default_factory=Unsharded)
    loss: EagerLoss | None = None
    held_outputs: HeldOutputs = NOTHING_HELD

    def collectives(self, gradients: Sequence[Iterable[int | None]]) -> Collectives:
        """The events around its calls; `gradients` as `GraphRun` has them, None for those of no argument."""
        runs = [
            GraphRun(call.layer, call.parameters, {at for at in own if at is not None}, again)
            for call, own, again in zip(self.calls, gradients, self.again, strict=True)
        ]
        collectives = self.sharding.collectives(runs)
        return collectives if self.loss is None else self.loss.around(collectives)

    @property
    def results(self) -> frozenset[int]:
        """Storages that the forward returns."""
        made = {number for call in self.calls for number in call.outputs.values()}
        return frozenset(made - self.given).difference(*(call.released for call in self.calls))

    def saved_behind(self, call: int) -> dict[int, int]:
        """Bytes of the storages that operators outside of all graphs save behind a call, by number; -1: before all."""
        behind = (operator for operator in self.outside if operator.call == call)
        return {tensor.storage: tensor.bytes for operator in behind for tensor in operator.saved}

    def at(self, sizes: Mapping[str, int]) -> "Tape":
        """With what is around its calls for a batch of these sizes; see `Sharding.at`."""
        loss = None if self.loss is None else self.loss.at(sizes)
        return replace(self, sharding=self.sharding.at(sizes), loss=loss)

    def run_keys(self, digests: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
        """Returns the digest, layer and call index of each call; `digests` are of the graphs."""
        return tuple((digests[call.graph], call.layer, call.call_index) for call in self.calls)

    def with_all_held(self) -> "Tape":
        """The same where each argument that a backward reads is held until then."""
        calls = (replace(call, offloaded=frozenset(), recomputed=frozenset()) for call in self.calls)
        return replace(self, calls=tuple(calls))

    def without_caller(self) -> "Tape":
        """The same without the outputs that the forward's caller holds, and the loss that it computes."""
        return replace(self, loss=None, held_outputs=NOTHING_HELD)

    def under(self, sharding: Sharding) -> "Tape":
        """The same calls of a model that is sharded so."""
        if not sharding.tells_outside or not self.calls:
            return replace(self, sharding=sharding)
        # What holds the results of the last call is among the events, too.
        last = replace(self.calls[-1], released=frozenset())
        return replace(self, calls=(*self.calls[:-1], last), outside=(), sharding=sharding)

    @cached_property
    def again(self) -> tuple[tuple[int, ...], ...]:
        """The calls that the backward of each runs again, in order."""
        again: list[tuple[int, ...]] = [()] * len(self.calls)
        there: set[int] = set()

        def missing(index: int) -> Iterator[int]:
            recomputed = (self.calls[index].inputs[place] for place in self.calls[index].recomputed)
            for source in sorted({self.source(index, number) for number in recomputed} - there):
                yield from missing(source)
                there.add(source)
                yield source

        for index in reversed(range(len(self.calls))):
            again[index] = tuple(missing(index))
        return tuple(again)

    def source(self, index: int, number: int) -> int:
        """The last call before one that has returned a storage."""
        return next(at for at in reversed(range(index)) if number in self.calls[at].outputs.values())

    @cached_property
    def returned(self) -> tuple[frozenset[int], ...]:
        """By call the storages that earlier ones have returned."""
        outputs = [frozenset(call.outputs.values()) for call in self.calls]
        return tuple(itertools.accumulate(outputs[:-1], frozenset.union, initial=frozenset()))

    @property
    def repeated(self) -> tuple[bool, ...]:
        """True for each call that a backward runs again, for an argument of another one."""
        repeated = {source for sources in self.again for source in sources}
        return tuple(index in repeated for index in range(len(self.calls)))

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that a rank gets in the all-gathers of a micro-batch, and gives in the reduce-scatters of an optimizer
        step; 0 for a single one, and where that is not counted. Its own share moves nowhere."""
        if not self.sharding.is_sharded or self.sharding.tells_outside:
            return 0, 0
        others, ranks = self.sharding.ranks - 1, self.sharding.ranks
        gathered, reduced = self.collectives([()] * len(self.calls)).moved
        return gathered * others // ranks, reduced * others // ranks

    @classmethod
    def of_one(
        cls, results: int = 0, loss: EagerLoss | None = None, held_outputs: HeldOutputs = NOTHING_HELD
    ) -> "Tape":
        """One graph that is all of a forward.

        Args:
            results: their number, where a loss is computed from them, or the caller holds them.
        """
        call = Call(0, outputs={place: place for place in range(results)})
        return cls((call,), loss=loss, held_outputs=held_outputs)

    @property
    def runs(self) -> tuple[int, ...]:
        """How often each graph runs."""
        counts = Counter(call.graph for call in self.calls)
        return tuple(counts[graph] for graph in range(len(counts)))


class RunId(NamedTuple):
    """What tells a run of a graph from the others of its forward; attributes as of `Call`."""

    graph: Hashable
    layer: str = ""
    call_index: int = 0
    offloaded: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()


class TapeRecorder:
    """Notes the runs of the graphs of a forward with these arguments while it runs."""

    def __init__(self, arguments: Iterable[object]) -> None:
        # Of each run what tells it from others, its call and its place in the order of autograd's operators.
        self._ids: list[RunId] = []
        self._calls: list[Call] = []
        self._orders: list[int] = []
        self._outside: list[tuple[OutsideOperator, tuple[Tensor, ...], Tensor | None]] = []
        self._numbers = itertools.count()
        # By address, which a storage that is gone may have left to another one.
        self._storages: dict[int, tuple[dynamo.StorageWeakRef, int]] = {}
        # The addresses of all that may go during the forward: what a model has is by far the most.
        self._passing: set[int] = set()
        self._parameters: dict[int, int] = {}
        self._given = set(self._numbered(list(arguments)).values())

    def before(self, run: RunId, arguments: Sequence[object], parameters: Sequence[str] = ()) -> None:
        """A graph is about to run; `parameters` as in `Call`, empty for other arguments."""
        self._note_released()
        names = {place: name for place, name in enumerate(parameters) if name}
        numbers, sizes = self._numbered(arguments), sizes_of(arguments)
        self._ids.append(run)
        _, layer, call_index, offloaded, recomputed = run
        self._calls.append(Call(0, numbers, {}, frozenset(), sizes, layer, call_index, names, offloaded, recomputed))

    def after(self, results: Sequence[object]) -> None:
        """The graph that was last about to run has returned."""
        self._calls[-1] = replace(self._calls[-1], outputs=self._numbered(results))
        self._orders.append(order_of(results))

    def end(self, outputs: Iterable[object]) -> None:
        self._note_released()
        outputs = list(outputs)
        self._note_saved(set(self._numbered(outputs).values()))
        for operator in outside_operators(outputs):
            saved = tuple(map(self._tensor, operator.saved))
            workspace = None if operator.workspace is None else self._tensor(operator.workspace)
            self._outside.append((replace(operator, saved=(), workspace=None), saved, workspace))

    @property
    def count(self) -> int:
        """How many runs there were."""
        return len(self._calls)

    @property
    def runs(self) -> Iterator[tuple[RunId, Mapping[int, tuple[int, ...]]]]:
        """All runs, with the sizes of their arguments."""
        return zip(self._ids, (call.sizes for call in self._calls), strict=True)

    def tape(self, graphs: Sequence[Hashable]) -> Tape:
        """The runs of these graphs so far; what others have returned comes from outside."""
        self._note_released()
        numbers = {graph: number for number, graph in enumerate(graphs)}
        calls: list[Call] = []
        orders: list[int] = []
        for run, call, order in zip(self._ids, self._calls, self._orders, strict=False):
            if run.graph in numbers:
                calls.append(replace(call, graph=numbers[run.graph]))
                orders.append(order)
            elif calls:
                calls[-1] = replace(calls[-1], released=calls[-1].released | call.released)
        given = frozenset({*self._given, *self._parameters.values()})
        outside = tuple(_outside(*operator, calls, orders, given) for operator in self._outside)
        return Tape(tuple(calls), given, outside)

    def _note_released(self) -> None:
        gone = [address for address in self._passing if self._storages[address][0].expired()]
        self._passing.difference_update(gone)
        numbers = {self._storages.pop(address)[1] for address in gone}
        if self._calls and numbers:
            self._calls[-1] = replace(self._calls[-1], released=self._calls[-1].released | numbers)

    def _note_saved(self, returned: Collection[int]) -> None:
        """Note as released what only a backward still holds: under another plan it may be gone behind its last use."""
        kept = {*returned, *self._given, *self._parameters.values()}
        last: dict[int, int] = {}
        for index, call in enumerate(self._calls):
            last.update(dict.fromkeys((*call.inputs.values(), *call.outputs.values()), index))
        for number in last.keys() - kept:
            call = self._calls[last[number]]
            self._calls[last[number]] = replace(call, released=call.released | {number})

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
            self._passing.add(address)
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
