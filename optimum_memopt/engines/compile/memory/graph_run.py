"""Running a training graph operator by operator: which tensors are held at each moment, and what each is. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from optimum_memopt.engines.api.predictions import CATEGORIES, GRADIENTS, RECOMPUTED, SAVED, TEMPORARY
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.liveness import Schedule
from optimum_memopt.engines.compile.memory.requests import Request
from optimum_memopt.engines.compile.memory.timeline import GraphTimeline

_BACKWARD = "backward "


class Held(NamedTuple):
    """A tensor's storage.

    Attributes:
        category: one of `CATEGORIES`.
        name: cluster id of a saved activation, or the operator that has allocated it.
        layer: path of the transformer layer, empty outside of all.
        bytes: its size.
    """

    category: str
    name: str
    layer: str
    bytes: int


# Of a storage: the name of its root, the operator that allocates it, its layer, its size.
_Describe = Callable[[str, str, str, int], Held]


@dataclass(frozen=True)
class Event:
    """What an operator, or a request of a compiled program, does to memory.

    Attributes:
        operator: its name.
        layer: path of the transformer layer, empty outside of all.
        allocates: storages by name, before it runs.
        workspace: held while it runs, beside its results; None: nothing.
        frees: names of storages, after it has run.
    """

    operator: str
    layer: str = ""
    allocates: tuple[tuple[str, Held], ...] = ()
    workspace: Held | None = None
    frees: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphRun:
    """A forward and its backward.

    Attributes:
        forward: in order.
        between: outputs are dropped, and the backward is given its gradients.
        backward: in order.
        counts: what an event is: `operators` or `allocations`.
    """

    forward: tuple[Event, ...]
    between: Event
    backward: tuple[Event, ...]
    counts: str = "operators"


@dataclass
class Memory:
    """The storages that are held.

    Attributes:
        held: by name.
        bytes: by category.
    """

    held: dict[str, Held] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))

    def begin(self, event: Event) -> None:
        """Allocate what an operator returns."""
        for name, storage in event.allocates:
            self.held[name] = storage
            self.bytes[storage.category] += storage.bytes

    def end(self, event: Event) -> None:
        """Free what nothing after the operator reads."""
        for name in event.frees:
            if (storage := self.held.pop(name, None)) is not None:
                self.bytes[storage.category] -= storage.bytes


def run_of_graphs(timeline: GraphTimeline, values: SymbolValues, cluster_ids: Mapping[str, str]) -> GraphRun:
    """Both graphs as PyTorch runs them.

    Args:
        timeline: of the two.
        values: of every symbol.
        cluster_ids: of saved activations, by the names of their roots.
    """
    sizes = timeline.sizes(values)
    roots = {name: saved[0] for name, saved in timeline.saved.items() if saved is not None}
    of_forward = _kinds(timeline.forward)
    saved = {root: cluster_ids.get(root, of_forward.get(root, ("", ""))[0]) for root in roots.values()}

    def in_forward(root: str, kind: str, layer: str, size: int) -> Held:
        return Held(SAVED, saved[root], layer, size) if root in saved else Held(TEMPORARY, kind, layer, size)

    freed = {timeline.backward.roots[storage] for event in timeline.backward.operators for storage in event.frees}

    def in_backward(root: str, kind: str, layer: str, size: int) -> Held:
        if root in of_forward:
            return Held(RECOMPUTED, kind, layer, size)
        return Held(TEMPORARY if root in freed else GRADIENTS, kind, layer, size)

    tangents = zip(timeline.tangent_roots, timeline.tangents, strict=True)
    given = {**roots, **{root: root for root in timeline.tangent_roots}}
    names = {root: given.get(root, f"{_BACKWARD}{root}") for root in timeline.backward.roots}
    between = Event(
        "",
        allocates=tuple((root, Held(TEMPORARY, "tangent", "", sizes[index])) for root, index in tangents),
        frees=timeline.returned_roots,
    )
    return GraphRun(
        tuple(_events(timeline.forward, sizes, {root: root for root in timeline.forward.roots}, in_forward)),
        between,
        tuple(_events(timeline.backward, sizes, names, in_backward)),
    )


def run_of_requests(requests: Sequence[Request], timeline: GraphTimeline, cluster_ids: Mapping[str, str]) -> GraphRun:
    """Two compiled programs, of which only the requests are known.

    Args:
        requests: of both programs, in order.
        timeline: of the graphs that they were compiled from.
        cluster_ids: of saved activations, by the names of their roots.
    """
    of_forward = _kinds(timeline.forward)
    saved = {entry[0] for entry in timeline.saved.values() if entry is not None}
    freed = {request.storage for request in requests if not request.bytes}
    given = set(timeline.tangent_roots)

    def held(request: Request) -> Held:
        kind, layer = of_forward.get(request.storage, ("", ""))
        if request.storage in saved:
            return Held(SAVED, cluster_ids.get(request.storage, kind), layer, request.bytes)
        is_gradient = request.storage.startswith(_BACKWARD) and request.storage not in freed
        return Held(GRADIENTS if is_gradient else TEMPORARY, "", "", request.bytes)

    events: list[Event] = [Event("")]
    first_of_backward = 0
    for request in requests:
        if request.bytes:
            if not first_of_backward and (request.storage in given or request.storage.startswith(_BACKWARD)):
                first_of_backward = len(events)
            events.append(Event(request.storage, allocates=((request.storage, held(request)),)))
        else:
            events[-1] = replace(events[-1], frees=(*events[-1].frees, request.storage))
    cut = first_of_backward or len(events)
    return GraphRun(tuple(events[1:cut]), Event(""), tuple(events[cut:]), "allocations")


def _kinds(graph: Schedule) -> dict[str, tuple[str, str]]:
    """Of each storage that a graph allocates the operator and its layer."""
    operators = zip(graph.operators, graph.kinds, graph.layers, strict=True)
    return {
        graph.roots[storage]: (kind, layer) for operator, kind, layer in operators for storage in operator.allocates
    }


def _events(graph: Schedule, sizes: Sequence[int], names: Mapping[str, str], held: _Describe) -> Iterator[Event]:
    for name, kind, layer, operator in zip(graph.names, graph.kinds, graph.layers, graph.operators, strict=True):
        allocates = (graph.roots[storage] for storage in operator.allocates)
        found = zip(allocates, operator.allocates, strict=True)
        workspace = sizes[operator.workspace]
        yield Event(
            name,
            layer,
            tuple((names[root], held(root, kind, layer, sizes[graph.storages[storage]])) for root, storage in found),
            Held(TEMPORARY, f"{kind} workspace", layer, workspace) if workspace else None,
            tuple(names[graph.roots[storage]] for storage in operator.frees),
        )
