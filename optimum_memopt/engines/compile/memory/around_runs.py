"""The events around the runs of a forward's graphs, as a sharded model has them. Pure.

A tape asks its `Sharding` for them; `sharding/` has those of FSDP2 and ZeRO 3.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from optimum_memopt.engines.api.predictions import TEMPORARY
from optimum_memopt.engines.compile.memory.events import Event

# Kinds of a collective's storages.
GATHER, REDUCE = "all_gather", "reduce_scatter"


class GraphRun(NamedTuple):
    """A run of a forward's graph.

    Attributes:
        layer: the path of its module, empty outside of all.
        parameters: among its arguments, by position; names may be those of an equal layer's.
        gradients: positions of the arguments whose gradients its backward returns.
        again: see `Tape.again`.
    """

    layer: str
    parameters: Mapping[int, str]
    gradients: Collection[int]
    again: Sequence[int]


class Reduced(NamedTuple):
    """The end of a group's backward: `before`, then its gradients are freed, in the event `copied`.

    Attributes:
        group: the identity of those that are gathered and reduced together.
    """

    group: object
    before: Event = Event("")
    copied: Event = Event("")
    after: Event = Event("")


@dataclass
class AroundRun:
    """The events around a run of a graph.

    Attributes:
        before: its forward.
        after: behind it.
        before_backward: once that is given its gradients.
        before_again: its forward, where a backward runs it once more.
        after_again: behind that.
        outside: what runs in no graph, before its backward is given its gradients.
        reduced: behind its backward.
        owners: by the position of an argument that is a sharded parameter, its group.
        given: the group with whose gradients those go that its backward is given; None: with none.
    """

    before: tuple[Event, ...] = ()
    after: tuple[Event, ...] = ()
    before_backward: tuple[Event, ...] = ()
    before_again: tuple[Event, ...] = ()
    after_again: tuple[Event, ...] = ()
    outside: tuple[Event, ...] = ()
    reduced: tuple[Reduced, ...] = ()
    owners: Mapping[int, object] = field(default_factory=dict)
    given: object | None = None


@dataclass(frozen=True)
class Collectives:
    """The events around the calls of a tape.

    Attributes:
        runs: by call.
        end_of_forward: behind the last forward.
        prefetched: at the begin of the backward.
        last: behind the backward of the first call.
        end: of the backward.
    """

    runs: tuple[AroundRun, ...]
    end_of_forward: tuple[Event, ...]
    prefetched: tuple[Event, ...]
    last: tuple[Reduced, ...]
    end: tuple[Event, ...]

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that a micro-batch all-gathers, and an optimizer step reduces, under FSDP2."""
        events = [*self.prefetched, *(reduced.copied for reduced in self.last)]
        for run in self.runs:
            events += (*run.before, *run.before_backward, *run.before_again)
            events += (reduced.copied for reduced in run.reduced)
        sizes = Counter[str]()
        for storage in itertools.chain(*(event.allocates for event in events)):
            sizes[storage.kind] += storage.bytes if storage.category == TEMPORARY else 0
        return sizes[GATHER], sizes[REDUCE]


class Sharding(Protocol):
    """A description of a step whose parameters several ranks share.

    Attributes:
        name: of what shards the model.
        ranks: that share the parameters.
        first: the same of the first step of a run, where that differs from later ones.
        stays_gathered: what is gathered before the first graph stays where a forward ends without its backward.
        tells_outside: its events are those of what runs in no graph, too.
        unknown: why it is not known what ranks gather; empty where it is.
    """

    name: ClassVar[str]
    stays_gathered: ClassVar[bool]
    tells_outside: ClassVar[bool]

    @property
    def is_sharded(self) -> bool: ...

    @property
    def ranks(self) -> int: ...

    @property
    def first(self) -> "Sharding":
        return self

    @property
    def unknown(self) -> str: ...

    def at(self, sizes: Mapping[str, int]) -> "Sharding":
        """The same with a batch of these sizes, by the names of a forward's arguments, `input_ids_dim0`."""
        return self

    def gathering_ahead(self, elements: int) -> "Sharding | None":
        """The same where each module has so many elements gathered ahead; None where none gathers a number of them."""
        return None

    def collectives(self, runs: Sequence[GraphRun]) -> Collectives:
        """The events around the runs of a forward's graphs."""


@dataclass(frozen=True)
class Unsharded(Sharding):
    """A model whose parameters each rank holds, or one of which it is not known what ranks gather."""

    unknown: str = ""

    name: ClassVar = ""
    is_sharded: ClassVar = False
    ranks: ClassVar = 1
    stays_gathered: ClassVar = False
    tells_outside: ClassVar = False

    def collectives(self, runs: Sequence[GraphRun]) -> Collectives:
        return Collectives(tuple(AroundRun() for _ in runs), (), (), (), ())
