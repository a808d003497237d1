"""What a training step held when it ran out of memory, tensor by tensor, from its graphs. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from optimum_memopt.engines.api.explanations import BACKWARD, GRADIENTS, SAVED, TEMPORARY, Moment, Part, Place, Tensors
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import Run, Simulation, held_before
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph

_OF_GRAPH_BEFORE = "outputs of the graph before"
Simulate = Callable[[CapturedGraph, Problem], Simulation]


@dataclass(frozen=True)
class Simulated:
    """A graph and its run with the batch that failed."""

    graph: CapturedGraph
    problem: Problem
    found: Simulation

    @classmethod
    def of(cls, graph: CapturedGraph, simulate: Simulate) -> "Simulated":
        problem = graph.problem_at(graph.sizes)
        return cls(graph, problem, simulate(graph, problem))

    @property
    def stashed(self) -> int:
        """Bytes that are held between forward and backward."""
        return self.found.stashed - sum(self._offloaded.values())

    @property
    def _offloaded(self) -> dict[int, int]:
        """Of each storage that is kept on the host, by its root."""
        problem = self.problem
        roots = {problem.roots[node] for node in self.graph.plans[0].offloaded}
        return {root: problem.bytes[root] for root in roots & {problem.roots[n] for n in self.found.saved}}

    def held(self, in_backward: bool, step: int) -> dict[int, int]:
        """Bytes by root before an operator allocates; offloaded storages are left out from the first to the last."""
        held = held_before(self.problem, self.found, in_backward, step)
        return {node: size for node, size in held.items() if node not in self._offloaded}

    def layer(self, node: int) -> str:
        """The path of an operator's layer; empty outside of all, and where the graph runs for several."""
        return self.problem.layers[node] if self.graph.runs == 1 else ""

    @cached_property
    def read(self) -> dict[int, int]:
        """Bytes of the inputs that its backward reads, by root: outputs of the graph before, where there is one.
        Parameters and buffers are left out."""
        read = {self.problem.roots[one] for node in self.found.backward.order for one in self.problem.reads[node]}
        return {node: self.problem.bytes[node] for node in sorted(read & self.graph.inputs)}

    @cached_property
    def waiting(self) -> dict[int, int]:
        """Bytes that are held for its backward while another graph runs, by root."""
        given = set(self.problem.tangents)
        return {node: size for node, size in self.held(True, 0).items() if node not in given}

    @cached_property
    def returned(self) -> dict[int, int]:
        """Bytes of the gradients of parameters that its backward has returned, by root."""
        held = self.held(True, len(self.found.backward.order))
        return {node: size for node, size in held.items() if node not in self.graph.passed_back}

    def parts(self, held: dict[int, int]) -> list[Part]:
        """By category; tensors of one row and layer together."""
        problem = self.problem
        gradients = {problem.roots[node] for node in problem.backward_outputs}
        saved = {problem.roots[node] for node in self.found.saved} | self.graph.inputs
        groups: dict[str, dict[tuple[str, str], int]] = {GRADIENTS: {}, SAVED: {}, TEMPORARY: {}}
        for node, size in held.items():
            category = GRADIENTS if node in gradients else SAVED if node in saved else TEMPORARY
            name = self.graph.rows.get(problem.names[node], "") if category == SAVED else ""
            name = _OF_GRAPH_BEFORE if node in self.graph.inputs else name
            key = name or operator_name(problem, node), self.layer(node)
            groups[category][key] = groups[category].get(key, 0) + size
        return [Part(category, sum(group.values()), _sorted(group)) for category, group in groups.items() if group]


@dataclass(frozen=True)
class Point:
    """An operator of a step.

    Attributes:
        number: of its graph.
        step: its place in the graph's order.
        before: bytes that all graphs hold before it allocates.
        during: bytes while it runs.
    """

    number: int
    step: int
    before: int
    during: int


def moment_of(graphs: Sequence[Simulated], place: Place, held: int, requested: int | None) -> tuple[Moment, Point]:
    """Where the allocation failed.

    Args:
        graphs: of the forward, in order; at least one operator ran.
        place: what the traceback tells.
        held: bytes of the graphs' tensors at that moment.
        requested: bytes of the allocation; None: not known.
    """
    in_backward = place.phase == BACKWARD
    points = list(_points(graphs, in_backward))

    def name(point: Point) -> str:
        graph = graphs[point.number]
        return graph.problem.names[_run(graph, in_backward).order[point.step]]

    named = [point for point in points if place.node and name(point) == place.node]
    if not named and place.module:
        points = [p for p in points if graphs[p.number].graph.modules.get(name(p)) == place.module] or points
    found = named[0] if named else _likeliest(points, held, requested)
    graph = graphs[found.number]
    node = _run(graph, in_backward).order[found.step]
    layer = graph.layer(node) or place.module
    return Moment(place.phase, layer, operator_name(graph.problem, node), bool(named)), found


def _likeliest(points: Sequence[Point], held: int, requested: int | None) -> Point:
    wanted = held + (requested or 1)
    # The step did not get further than to the first operator with which this much is held.
    reached = next((point for point in points if point.during >= wanted), None)
    # Messages round to hundredths of their unit.
    as_large = [p for p in points if requested and abs(p.during - p.before - requested) <= 0.01 * requested]
    likely = [*as_large, reached or max(points, key=lambda point: point.during)]
    return min(likely, key=lambda point: abs(point.before - held))


def parts_at(graphs: Sequence[Simulated], in_backward: bool, point: Point) -> list[Part]:
    """What the graphs hold just before an operator allocates."""
    found: dict[str, list[Part]] = {}
    for number, graph in enumerate(graphs):
        read = graph.read if number else {}
        if number == point.number:
            parts = graph.parts({**read, **graph.held(in_backward, point.step)})
        elif number < point.number or (in_backward and number > point.number):
            # Earlier graphs wait for their backward; later ones have had theirs.
            parts = graph.parts({**read, **graph.waiting} if number < point.number else graph.returned)
        else:
            continue
        for part in parts:
            found.setdefault(part.category, []).append(part)
    return [
        Part(category, sum(part.bytes for part in parts), _together(each for part in parts for each in part.tensors))
        for category, parts in found.items()
    ]


def _points(graphs: Sequence[Simulated], in_backward: bool) -> Iterator[Point]:
    order = list(enumerate(graphs))
    for number, graph in reversed(order) if in_backward else order:
        waiting = sum(other.stashed for other in graphs[:number])
        waiting += sum(sum(other.read.values()) for other in graphs[1 : number + 1])
        returned = sum(sum(other.returned.values()) for other in graphs[number + 1 :]) if in_backward else 0
        run = _run(graph, in_backward)
        here = set(run.order)
        for step, node in enumerate(run.order):
            new = sum(graph.problem.bytes[each] for each in graph.problem.allocates[node] if each in here)
            during = waiting + returned + run.held[step]
            yield Point(number, step, during - new - graph.problem.workspaces[node], during)


def _run(graph: Simulated, in_backward: bool) -> Run:
    return graph.found.backward if in_backward else graph.found.forward


def operator_name(problem: Problem, node: int) -> str:
    """`gelu` of `aten.gelu.default`."""
    source = problem.picks[node]
    parts = problem.kinds[node if source is None else source].split(".")
    return parts[min(1, len(parts) - 1)]


def _together(tensors: Iterable[Tensors]) -> tuple[Tensors, ...]:
    """Those of one row and layer as one: a graph that runs for several layers has them several times."""
    group: dict[tuple[str, str], int] = {}
    for each in tensors:
        group[each.row, each.layer] = group.get((each.row, each.layer), 0) + each.bytes
    return _sorted(group)


def _sorted(group: dict[tuple[str, str], int]) -> tuple[Tensors, ...]:
    tensors = (Tensors(row, layer, size) for (row, layer), size in group.items() if size)
    return tuple(sorted(tensors, key=lambda each: -each.bytes))
