"""A forward as the sequence of its graphs' runs, and the storages that pass between them. Pure.

A single graph is a tape of one run.
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
from optimum_memopt.engines.compile.memory.schedule import Schedule
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.torch_compat import dynamo
from optimum_memopt.engines.torch_compat.autograd import Edge, OutsideOperator, edges_of, graph_of, outside_operators


@dataclass(frozen=True)
class Call:
    """One run of a graph. Storages are numbered.

    Attributes:
        graph: index of the graph among the forward's graphs.
        inputs: the storage of each tensor argument, by position.
        outputs: the storage of each tensor result, by position.
        released: storages that are freed before the next graph runs.
        sizes: shapes of tensor arguments that are not parameters, and values of integer arguments, by position.
        layer: path of the layer that this graph is the forward of; empty outside of layers compiled by themselves.
        call_index: number of earlier runs of the same graph for the same layer, or outside of layers, in this forward.
        parameters: names of parameter arguments in the model, by position; for equal layers, those of the first layer.
        offloaded: positions of arguments that are kept on the host until the backward.
        recomputed: positions of arguments that are recomputed for the backward, by the run that returned them.
        unread: positions of results that no output of the forward depends on, such as that of SigLIP's head in
            PaliGemma.
        is_unread: no output depends on any of its results, as in the last layer of LLaVA's vision tower; the run has
            no backward.
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
    unread: frozenset[int] = frozenset()
    is_unread: bool = False


# Kind of the storages of operators outside of all graphs.
BETWEEN = "between graphs"


def gradient_name(number: int) -> str:
    """Returns the name that events use for a gradient outside of all graphs."""
    return f"gradient {number}"


class Tensor(NamedTuple):
    """A tensor outside of all graphs.

    Attributes:
        storage: number of its storage; gradients have numbers of their own.
        shape: shape of the tensor.
        bytes: size of the storage.
    """

    storage: int
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Outside:
    """An operator that autograd runs outside of all graphs.

    Attributes:
        name: name of its backward.
        call: index of the last call before it in the forward; -1: none.
        saved: tensors that it saves.
        workspace: a tensor as large as the workspace of its backward; None: it has no workspace.
        allocates: gradients that its backward computes.
        frees: numbers of the gradients that its backward is the last to read.
        passed: number of each gradient that belongs to a graph's result, with the storage of that result.
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
        """Returns the event of its backward, without the frees of the tensors that it saved."""
        gradients = ((gradient_name(tensor.storage), tensor.bytes) for tensor in self.allocates)
        allocates = tuple(Storage(name, size, TEMPORARY, BETWEEN) for name, size in gradients)
        workspace = self.workspace.bytes if self.workspace is not None else 0
        return Event(self.name, self.name, "", allocates, workspace, tuple(map(gradient_name, self.frees)))


@dataclass(frozen=True)
class Tape:
    """The runs of a forward's graphs.

    Attributes:
        calls: the runs, in order.
        given: storages that existed before: the forward's arguments, and parameters.
        outside: operators outside of all graphs, in the order of the backward.
        sharding: how ranks share the model's parameters.
        loss: the loss computed outside of the forward; None: the forward computes it.
        held_outputs: which of `results` the forward's caller holds, and how long.
    """

    calls: tuple[Call, ...]
    given: frozenset[int] = frozenset()
    outside: tuple[Outside, ...] = ()
    sharding: Sharding = field(default_factory=Unsharded)
    loss: EagerLoss | None = None
    held_outputs: HeldOutputs = NOTHING_HELD

    def collectives(self, gradients: Sequence[Iterable[int | None]]) -> Collectives:
        """Returns the events around its calls.

        Args:
            gradients: `GraphRun.gradients` of each call; None for gradients that belong to no argument.
        """
        runs = [
            GraphRun(call.layer, call.parameters, {at for at in own if at is not None}, again)
            for call, own, again in zip(self.calls, gradients, self.again, strict=True)
        ]
        collectives = self.sharding.collectives(runs)
        return collectives if self.loss is None else self.loss.around(collectives)

    @property
    def results(self) -> frozenset[int]:
        """Returns the storages that the forward returns."""
        made = {number for call in self.calls for number in call.outputs.values()}
        return frozenset(made - self.given).difference(*(call.released for call in self.calls))

    def ends_at(self, call: int) -> int:
        """Returns the last call after which a result of a call is freed, if only the forward's code holds them."""
        results = set(self.calls[call].outputs.values()) - self.given
        ends = {number: index for index, each in enumerate(self.calls) for number in each.released}
        return max((ends.get(number, len(self.calls) - 1) for number in results), default=call)

    def saved_behind(self, call: int) -> dict[int, int]:
        """Returns the bytes of storages, by number, saved outside of all graphs after a call; -1: before the first."""
        behind = (operator for operator in self.outside if operator.call == call)
        return {tensor.storage: tensor.bytes for operator in behind for tensor in operator.saved}

    def at(self, sizes: Mapping[str, int]) -> "Tape":
        """Returns the tape with sharding and loss for a batch of these sizes; see `Sharding.at`."""
        loss = None if self.loss is None else self.loss.at(sizes)
        return replace(self, sharding=self.sharding.at(sizes), loss=loss)

    def run_keys(self, digests: Sequence[str]) -> tuple[tuple[str, str, int], ...]:
        """Returns the graph digest, layer and call index of each call; `digests` has one entry per graph."""
        return tuple((digests[call.graph], call.layer, call.call_index) for call in self.calls)

    def with_all_held(self) -> "Tape":
        """Returns the tape without offload and recompute of arguments: each is held until its backward."""
        calls = (replace(call, offloaded=frozenset(), recomputed=frozenset()) for call in self.calls)
        return replace(self, calls=tuple(calls))

    def without_caller(self) -> "Tape":
        """Returns the tape without the outputs that the forward's caller holds and the loss that it computes."""
        return replace(self, loss=None, held_outputs=NOTHING_HELD)

    def under(self, sharding: Sharding) -> "Tape":
        """Returns the tape of the same calls with this sharding."""
        calls = self.calls
        if sharding.is_sharded:
            # Ranks exchange the gradients of all layers.
            calls = tuple(replace(call, unread=frozenset(), is_unread=False) for call in calls)
        if not sharding.tells_outside or not calls:
            return replace(self, calls=calls, sharding=sharding)
        # The sharding's events include the operators that hold the last call's results.
        last = replace(calls[-1], released=frozenset())
        return replace(self, calls=(*calls[:-1], last), outside=(), sharding=sharding)

    @cached_property
    def again(self) -> tuple[tuple[int, ...], ...]:
        """Returns the calls that the backward of each call reruns, in order."""
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
        """Returns the last call before `index` that returned the storage `number`."""
        return next(at for at in reversed(range(index)) if number in self.calls[at].outputs.values())

    @cached_property
    def returned(self) -> tuple[frozenset[int], ...]:
        """Returns, for each call, the storages that earlier calls returned."""
        outputs = [frozenset(call.outputs.values()) for call in self.calls]
        return tuple(itertools.accumulate(outputs[:-1], frozenset.union, initial=frozenset()))

    @property
    def repeated(self) -> tuple[bool, ...]:
        """Returns for each call whether a backward reruns its forward to recompute another call's argument."""
        repeated = {source for sources in self.again for source in sources}
        return tuple(index in repeated for index in range(len(self.calls)))

    @property
    def moved(self) -> tuple[int, int]:
        """Returns the bytes that a rank receives in a micro-batch's all-gathers, and sends in an optimizer step's
        reduce-scatters; 0 for a single rank, and if they are not counted. A rank's own share is not transferred."""
        if not self.sharding.is_sharded or self.sharding.tells_outside:
            return 0, 0
        others, ranks = self.sharding.ranks - 1, self.sharding.ranks
        gathered, reduced = self.collectives([()] * len(self.calls)).moved
        return gathered * others // ranks, reduced * others // ranks

    @classmethod
    def of_one(
        cls, results: int = 0, loss: EagerLoss | None = None, held_outputs: HeldOutputs = NOTHING_HELD
    ) -> "Tape":
        """Returns the tape of a forward that is one graph.

        Args:
            results: number of its results, if a loss is computed from them or the caller holds them.
        """
        call = Call(0, outputs={place: place for place in range(results)})
        return cls((call,), loss=loss, held_outputs=held_outputs)

    @property
    def runs(self) -> tuple[int, ...]:
        """Returns the number of runs of each graph."""
        counts = Counter(call.graph for call in self.calls)
        return tuple(counts[graph] for graph in range(len(counts)))


class RunId(NamedTuple):
    """Identifies a run of a graph within its forward; attributes as in `Call`."""

    graph: Hashable
    layer: str = ""
    call_index: int = 0
    offloaded: frozenset[int] = frozenset()
    recomputed: frozenset[int] = frozenset()


class TapeRecorder:
    """Records the runs of graphs during a forward with these arguments."""

    def __init__(self, arguments: Iterable[object]) -> None:
        # Per run: its id, its call and the edges of its results in autograd's graph.
        self._ids: list[RunId] = []
        self._calls: list[Call] = []
        self._edges: list[dict[int, Edge]] = []
        self._outside: list[tuple[OutsideOperator, tuple[Tensor, ...], Tensor | None]] = []
        self._numbers = itertools.count()
        # Storages by address; the address of a freed storage may be reused.
        self._storages: dict[int, tuple[dynamo.StorageWeakRef, int]] = {}
        # Addresses of storages that may be freed during the forward, a small part: parameters are not among them.
        self._passing: set[int] = set()
        self._parameters: dict[int, int] = {}
        self._given = set(self._numbered(list(arguments)).values())

    def before(self, run: RunId, arguments: Sequence[object], parameters: Sequence[str] = ()) -> None:
        """Record that a graph is about to run.

        Args:
            parameters: `Call.parameters` as a sequence, with empty names for other arguments.
        """
        self._note_released()
        names = {place: name for place, name in enumerate(parameters) if name}
        numbers, sizes = self._numbered(arguments), sizes_of(arguments)
        self._ids.append(run)
        _, layer, call_index, offloaded, recomputed = run
        self._calls.append(Call(0, numbers, {}, frozenset(), sizes, layer, call_index, names, offloaded, recomputed))

    def after(self, results: Sequence[object]) -> None:
        """Record the results of the graph that `before` announced."""
        self._calls[-1] = replace(self._calls[-1], outputs=self._numbered(results))
        self._edges.append(edges_of(results))

    def end(self, outputs: Iterable[object]) -> None:
        self._note_released()
        outputs = list(outputs)
        self._note_saved(set(self._numbered(outputs).values()))
        nodes, edges = graph_of(outputs)
        self._note_unread(edges)
        for operator in outside_operators(nodes):
            saved = tuple(map(self._tensor, operator.saved))
            workspace = None if operator.workspace is None else self._tensor(operator.workspace)
            self._outside.append((replace(operator, saved=(), workspace=None), saved, workspace))

    @property
    def count(self) -> int:
        """Returns the number of runs."""
        return len(self._calls)

    @property
    def runs(self) -> Iterator[tuple[RunId, Mapping[int, tuple[int, ...]]]]:
        """Returns the id of each run, with the sizes of its arguments."""
        return zip(self._ids, (call.sizes for call in self._calls), strict=True)

    def tape(self, graphs: Sequence[Hashable]) -> Tape:
        """Returns the tape of these graphs' runs so far; results of other graphs count as inputs from outside."""
        self._note_released()
        numbers = {graph: number for number, graph in enumerate(graphs)}
        calls: list[Call] = []
        orders: list[int] = []
        for run, call, edges in zip(self._ids, self._calls, self._edges, strict=False):
            if run.graph in numbers:
                calls.append(replace(call, graph=numbers[run.graph]))
                orders.append(max((edge.order for edge in edges.values()), default=-1))
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
        """Mark storages that only a backward holds as released: another plan may free them after their last use."""
        kept = {*returned, *self._given, *self._parameters.values()}
        # The forward's own code held these until they were released.
        kept.update(*(call.released for call in self._calls))
        last: dict[int, int] = {}
        for index, call in enumerate(self._calls):
            last.update(dict.fromkeys((*call.inputs.values(), *call.outputs.values()), index))
        for number in last.keys() - kept:
            call = self._calls[last[number]]
            self._calls[last[number]] = replace(call, released=call.released | {number})

    def _note_unread(self, read: set[Edge]) -> None:
        """Mark results that get no gradient, and runs without a backward.

        Args:
            read: the edges that the outputs depend on.
        """
        # If nothing depends on the last run, the outputs are in objects whose tensors are not found.
        if not self._edges or read.isdisjoint(self._edges[-1].values()):
            return
        for index, edges in enumerate(self._edges):
            if unread := frozenset(place for place, edge in edges.items() if edge not in read):
                is_unread = len(unread) == len(edges)
                self._calls[index] = replace(self._calls[index], unread=unread, is_unread=is_unread)

    def _numbered(self, values: Sequence[object]) -> dict[int, int]:
        return {place: self._number(tensor) for place, tensor in enumerate(values) if isinstance(tensor, torch.Tensor)}

    def _tensor(self, tensor: torch.Tensor) -> Tensor:
        shape = tuple(map(int, tensor.shape))
        return Tensor(self._number(tensor), shape, tensor.untyped_storage().nbytes())

    def _number(self, tensor: torch.Tensor) -> int:
        if isinstance(tensor, torch.nn.Parameter):
            number = self._parameters.setdefault(id(tensor), next(self._numbers))
            # FSDP2 passes a layer views of its parameters, which share this storage.
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
    """Returns the sizes of a graph's arguments; see `Call.sizes`."""
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
    passed = ((number, edge) for number, edge in operator.passed if edge.order in of_call)
    results = ((number, of_call[edge.order].outputs.get(edge.number)) for number, edge in passed)
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
    """Returns the tape for another batch, and the symbols' values of each call.

    An argument that is another graph's result has its sizes from the sizes of that graph. Other sizes are looked up by
    name; sizes without a name change like a size that was equal to them in the first batch.

    Args:
        tape: the tape of the first batch.
        schedules: the schedules of its graphs.
        first: for each graph, the symbols' values in the first batch.
        named: for each graph, the values of named symbols in the new batch.
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
        # The graph may also run for another length than that in its sizes' names.
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
    """A tensor that a graph takes or returns.

    Attributes:
        storage: number of its storage.
        before: its shape on the tape.
        now: its shape in the other batch.
    """

    storage: int
    before: tuple[int, ...]
    now: tuple[int, ...]


def _grown(size: int, shapes: Sequence[_Shape], place: int | None = None) -> int:
    """Returns the new value of an unnamed size: that of an equal size that changed, of the same dimension if there is
    one."""
    equal = [
        (at != place, new)
        for shape in shapes
        for at, (old, new) in enumerate(zip(shape.before, shape.now, strict=True))
        if old == size != new
    ]
    return min(equal, key=lambda match: match[0], default=(False, size))[1]


def _grown_bytes(tensor: Tensor, shapes: Sequence[_Shape]) -> int:
    """Returns the new bytes of a tensor outside of all graphs, by the shape with the longest common prefix."""

    def common(shape: _Shape) -> int:
        pairs = zip(shape.before, tensor.shape, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    nearest = max(shapes, key=common, default=None)
    kept = nearest.now[: common(nearest)] if nearest is not None else ()
    rest = (_grown(size, shapes, place) for place, size in enumerate(tensor.shape) if place >= len(kept))
    return tensor.bytes * math.prod((*kept, *rest)) // max(1, math.prod(tensor.shape))
