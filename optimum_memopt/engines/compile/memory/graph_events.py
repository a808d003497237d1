"""The memory of one graph's forward and backward: its event streams, and the bytes held during each operator. Pure.

Three sources write them: the graphs that a joint graph was partitioned into (`schedule.py`), a problem with a set of
saved nodes (`simulation.py`), and the programs that inductor wrote (`inductor_programs.py`). `composition.py` merges
the streams of a step's graphs into one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, TypeVar

from optimum_memopt.engines.compile.graph.layouts import Layouts
from optimum_memopt.engines.simulator.events import Event, Storage, bytes_during
from optimum_memopt.engines.torch_compat import dynamo

# Prefix of the names of storages that a backward allocates: recomputed operators are named as in the forward.
BACKWARD = "backward "


@dataclass(frozen=True)
class GraphEvents:
    """The events of one graph's forward and backward. Positions index the compiled graph's arguments or results.

    Attributes:
        forward: events of the forward, in order.
        backward: events of the backward, in order; they also free saved inputs, which the inputs' owner may ignore.
        inputs: storages of the forward's tensor arguments, without parameters, by position.
        outputs: position and storage name of each returned tensor that is not saved; the position is None if the
            caller does not get the tensor, the name empty if it has no storage of its own.
        saved: storages that the forward saves for the backward, each once, without inputs.
        saved_inputs: names of `inputs` that the backward reads.
        saved_values: pairs of a saved tensor's name as an input of the backward, and its storage's name; the latter is
            empty for an input of the forward.
        tangents: incoming gradients of the backward, with the position of the output that each belongs to.
        gradients: input position and storage name of each gradient that the backward returns, in its order.
        layouts: memory layouts of tangents and gradients.
        accumulations: input positions of the gradients that the backward accumulates in place.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    inputs: Mapping[int, Storage]
    outputs: tuple[tuple[int | None, str], ...]
    saved: tuple[Storage, ...]
    saved_inputs: frozenset[str]
    tangents: tuple[tuple[int | None, Storage], ...]
    gradients: tuple[tuple[int | None, str], ...]
    saved_values: tuple[tuple[str, str], ...] = ()
    layouts: Layouts = field(default_factory=Layouts)
    accumulations: frozenset[int] = frozenset()

    def with_earlier_gradients(self) -> "GraphEvents":
        """Returns the events of a later micro-batch, whose `accumulations` take no memory."""
        sums = {name for position, name in self.gradients if position in self.accumulations}
        if not sums:
            return self
        return replace(
            self,
            backward=tuple(
                event._replace(
                    allocates=tuple(each._replace(bytes=0) if each.name in sums else each for each in event.allocates)
                )
                for event in self.backward
            ),
        )

    def as_run(self) -> "GraphEvents":
        """Returns the events as torch runs the graph: some versions hold tangents until the backward ends."""
        tangents = {storage.name for _, storage in self.tangents}
        freed = tuple(name for event in self.backward for name in event.frees if name in tangents)
        if not freed or not dynamo.holds_tangents():
            return self
        kept = [tuple(name for name in event.frees if name not in tangents) for event in self.backward]
        kept[-1] += freed
        backward = (event._replace(frees=frees) for event, frees in zip(self.backward, kept, strict=True))
        return replace(self, backward=tuple(backward))

    def without_backward(self) -> "GraphEvents":
        """Returns the events of the forward alone, after which what it saves is still held."""
        return GraphEvents(
            self.forward,
            backward=(),
            inputs=self.inputs,
            outputs=self.outputs,
            saved=(),
            saved_inputs=frozenset(),
            tangents=(),
            gradients=(),
        )

    @property
    def returned(self) -> tuple[str, ...]:
        """Returns the names of the outputs' storages that are not saved: only the forward's caller holds them."""
        saved = {storage.name for storage in self.saved}
        return tuple(dict.fromkeys(name for _, name in self.outputs if name and name not in saved))


Node = TypeVar("Node", int, str)


@dataclass(frozen=True)
class RunMemory(Generic[Node]):
    """The memory of one run of a graph.

    Attributes:
        order: its operators in order, by name or number.
        held: bytes held while each operator runs.
        end: bytes held after the last operator.
    """

    order: tuple[Node, ...]
    held: tuple[int, ...]
    end: int

    @cached_property
    def peak(self) -> int:
        # A backward that returns its incoming gradient unchanged has no operators.
        return max(self.held, default=self.end)


@dataclass(frozen=True)
class Prediction(Generic[Node]):
    """The memory of one graph's forward and backward, in bytes above existing parameters, inputs and gradients.

    Attributes:
        saved_bytes: bytes held between forward and backward.
    """

    forward: RunMemory[Node]
    backward: RunMemory[Node]
    saved_bytes: int

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.backward.peak)


def prediction_of(graph: GraphEvents) -> Prediction[str]:
    """Returns the prediction for a graph that is the whole forward."""
    before = Event("", frees=graph.returned)
    given = Event("", allocates=tuple(storage for _, storage in graph.tangents))
    during, end = bytes_during((*graph.forward, before, given, *graph.backward))
    count = len(graph.forward)
    _, left = bytes_during(graph.forward)
    _, saved = bytes_during((*graph.forward, before))
    forward, backward = (tuple(event.operator for event in events) for events in (graph.forward, graph.backward))
    return Prediction(
        RunMemory(forward, tuple(during[:count]), left), RunMemory(backward, tuple(during[count + 2 :]), end), saved
    )
