"""The events of a sharded model around the runs of a forward's graphs. Pure.

A tape gets them from its `Sharding`; `sharding/` implements FSDP2 and ZeRO 3.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from optimum_memopt.engines.api.predictions import TEMPORARY
from optimum_memopt.engines.simulator.events import Event

# Kinds of the storages of collectives.
GATHER, REDUCE = "all_gather", "reduce_scatter"


class GraphRun(NamedTuple):
    """A run of a forward's graph.

    Attributes:
        layer: path of its layer; empty outside of all layers.
        parameters: names of the arguments that are parameters, by position; they may be those of an equal layer.
        gradients: positions of the arguments whose gradients its backward returns.
        again: the runs that its backward reruns; see `Tape.again`.
    """

    layer: str
    parameters: Mapping[int, str]
    gradients: Collection[int]
    again: Sequence[int]


class Reduced(NamedTuple):
    """The end of a sharded group's backward, as three events; the group's gradients are freed in `copied`.

    Attributes:
        group: identifies the parameters that are gathered and reduced together.
    """

    group: object
    before: Event = Event("")
    copied: Event = Event("")
    after: Event = Event("")


@dataclass
class AroundRun:
    """The events around a run of a graph.

    Attributes:
        before: events before its forward.
        after: events after its forward.
        before_backward: events before its backward, once the tangents exist.
        before_again: events before its forward when a backward reruns it.
        after_again: events after the rerun forward.
        outside: events of operators outside of all graphs, before the tangents of its backward exist.
        reduced: ends of the groups that are reduced after its backward.
        owners: the group of each argument that is a sharded parameter, by position.
        given: the group with whose gradients the tangents of its backward are freed; None: no group.
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
        runs: the events around each call.
        end_of_forward: events after the last forward, before its caller drops the results.
        prefetched: events at the start of the backward.
        last: ends of the groups that are reduced after the backward of the first call.
        end: events at the end of the backward.
        without_results: events after the caller has dropped the results, before the backward.
    """

    runs: tuple[AroundRun, ...]
    end_of_forward: tuple[Event, ...]
    prefetched: tuple[Event, ...]
    last: tuple[Reduced, ...]
    end: tuple[Event, ...]
    without_results: tuple[Event, ...] = ()

    @property
    def moved(self) -> tuple[int, int]:
        """Returns the bytes that a micro-batch all-gathers and an optimizer step reduce-scatters under FSDP2."""
        events = [*self.prefetched, *(reduced.copied for reduced in self.last)]
        for run in self.runs:
            events += (*run.before, *run.before_backward, *run.before_again)
            events += (reduced.copied for reduced in run.reduced)
        sizes = Counter[str]()
        for storage in itertools.chain(*(event.allocates for event in events)):
            sizes[storage.kind] += storage.bytes if storage.category == TEMPORARY else 0
        return sizes[GATHER], sizes[REDUCE]


class Sharding(Protocol):
    """How the ranks of a training step share the model's parameters.

    Attributes:
        name: name of the sharding method.
        ranks: number of ranks that share the parameters.
        first: the sharding in the first step of a run, if it differs from later steps.
        stays_gathered: whether parameters gathered before the first graph stay gathered if no backward follows the
            forward.
        tells_outside: whether its events include those of operators outside of all graphs.
        unknown: why it is unknown what ranks gather; empty if it is known.
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
        """Returns the sharding for a batch of these sizes, by argument and dimension, `input_ids_dim0`."""
        return self

    def gathering_ahead(self, elements: int) -> "Sharding | None":
        """Returns the sharding if each module gathers this many elements ahead; None if that is not supported."""
        return None

    def collectives(self, runs: Sequence[GraphRun]) -> Collectives:
        """Returns the events around the runs of a forward's graphs."""


@dataclass(frozen=True)
class Unsharded(Sharding):
    """A model that is not sharded, or whose sharding is unknown."""

    unknown: str = ""

    name: ClassVar = ""
    is_sharded: ClassVar = False
    ranks: ClassVar = 1
    stays_gathered: ClassVar = False
    tells_outside: ClassVar = False

    def collectives(self, runs: Sequence[GraphRun]) -> Collectives:
        return Collectives(tuple(AroundRun() for _ in runs), (), (), (), ())
