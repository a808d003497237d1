"""The tensors of a training step when it ran out of memory, from its graphs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optimum_memopt.engines.api.explanations import BACKWARD, Moment, Part, Place, Tensors
from optimum_memopt.engines.api.predictions import CATEGORIES
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.memory.composition import StepEvents, compose
from optimum_memopt.engines.compile.memory.events import GraphEvents, bytes_during, held_before
from optimum_memopt.engines.compile.memory.simulation import problem_events
from optimum_memopt.engines.compile.partition.captured_forward import problems_of_runs
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph


def step_of(
    graphs: Sequence[CapturedGraph], times: int = 1, largest: LargestBatch | None = None, accumulates: bool = False
) -> StepEvents:
    """The events of a step under the plans that were applied; arguments as in `forward_solver` and `compose`."""
    tape, problems = problems_of_runs(graphs, [graph.sizes_for(times, largest) for graph in graphs])
    events: dict[tuple[int, int], GraphEvents] = {}
    runs: list[GraphEvents] = []
    for call, problem in zip(tape.calls, problems, strict=True):
        if (key := (call.graph, id(problem))) not in events:
            graph = graphs[call.graph]
            saved = graph.simulated(problem).saved
            events[key] = problem_events(problem, saved, graph.rows, graph.plans[0].offloaded)
        runs.append(events[key])
    return compose(tape, runs, accumulates)


@dataclass(frozen=True)
class Point:
    """An operator of a step, by the index of its event: bytes of all graphs before it allocates, and while it runs."""

    index: int
    before: int
    during: int


@dataclass(frozen=True)
class HeldStep:
    """A step up to the operator whose allocation failed.

    Attributes:
        modules: paths of modules, by operator.
        shows_layers: each operator is of the layer that it names.
    """

    step: StepEvents
    modules: Mapping[str, str]
    shows_layers: bool = True

    def moment(self, place: Place, held: int, requested: int | None) -> tuple[Moment, Point]:
        """Where the allocation failed."""
        points = self._points(place.phase == BACKWARD)
        named = [point for point in points if place.node and self._node(point) == place.node]
        if not named and place.module:
            points = [point for point in points if self.modules.get(self._node(point)) == place.module] or points
        point = named[0] if named else _likeliest(points, held, requested)
        event = self.step.events[point.index]
        return Moment(place.phase, self._layer(event.layer) or place.module, event.kind, bool(named)), point

    def parts(self, point: Point) -> list[Part]:
        """The storages that the graphs hold just before an operator allocates, by category, row and layer."""
        groups: dict[str, dict[tuple[str, str], int]] = {}
        for storage in held_before(self.step.events[: point.index]).values():
            group = groups.setdefault(storage.category, {})
            key = storage.kind, self._layer(storage.layer)
            group[key] = group.get(key, 0) + storage.bytes
        return [
            Part(category, sum(groups[category].values()), _sorted(groups[category]))
            for category in CATEGORIES
            if any(groups.get(category, {}).values())
        ]

    def _layer(self, layer: str) -> str:
        """Empty where a graph runs for several layers, whose operators have the first one's path."""
        return layer if self.shows_layers else ""

    def _node(self, point: Point) -> str:
        return self.step.events[point.index].operator

    def _points(self, in_backward: bool) -> list[Point]:
        during, _ = bytes_during(self.step.events)
        first = len(self.step.forward)
        return [
            Point(index, size - event.workspace - sum(storage.bytes for storage in event.allocates), size)
            for index, (event, size) in enumerate(zip(self.step.events, during, strict=True))
            if event.operator and (index > first) == in_backward
        ]


def _likeliest(points: Sequence[Point], held: int, requested: int | None) -> Point:
    wanted = held + (requested or 1)
    # The step did not get further than to the first operator with which this much is held.
    reached = next((point for point in points if point.during >= wanted), None)
    # Messages round to hundredths of their unit.
    as_large = [p for p in points if requested and abs(p.during - p.before - requested) <= 0.01 * requested]
    likely = [*as_large, reached or max(points, key=lambda point: point.during)]
    return min(likely, key=lambda point: abs(point.before - held))


def _sorted(group: dict[tuple[str, str], int]) -> tuple[Tensors, ...]:
    tensors = (Tensors(row, layer, size) for (row, layer), size in group.items() if size)
    return tuple(sorted(tensors, key=lambda each: -each.bytes))
