"""The graphs of a tape as one problem, for a solver that knows nothing of tapes. Pure.

Forwards stand in the order of the tape, backwards in the opposite one. What one graph returns and another reads is
read there through a view that must not run twice: no backward recomputes past its own graph's inputs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from optimum_memopt.engines.compile.graph.problem import Positions, Problem
from optimum_memopt.engines.compile.memory.events import Event
from optimum_memopt.engines.compile.memory.sharding import Reduced
from optimum_memopt.engines.compile.memory.tape import Tape, gradient_name
from optimum_memopt.engines.compile.torch_compat.fully_shard import ShardedGroup

# Operators between graphs: a storage that is handed on, one that is made outside of all, arguments that are held until
# a graph has returned, sums of gradients, gradients that are added to those of earlier micro-batches, and buffers of
# collectives that are released.
_PASSED, _OUTSIDE, _RETURNED, _SUMMED, _ADDED, _RELEASED = (
    "passed",
    "outside",
    "returned",
    "summed",
    "added",
    "released",
)


@dataclass(frozen=True)
class TapeProblem:
    """A tape as one problem.

    Attributes:
        tape: whose calls the runs are.
        accumulates: see `compose`.
        places: of each of its nodes the run, and the node in that run's own problem; -1: in none.
    """

    problem: Problem
    runs: tuple[Problem, ...]
    tape: Tape
    places: tuple[tuple[int, int], ...]
    accumulates: bool = False

    @property
    def graphs(self) -> tuple[int, ...]:
        """The graph of each run."""
        return tuple(call.graph for call in self.tape.calls)

    def of_runs(self, nodes: Collection[int]) -> tuple[frozenset[int], ...]:
        """The nodes that each run's forward saves where these are saved, by the numbers of its own problem."""
        return tuple(problem.closure(saved) for problem, saved in zip(self.runs, self.of_places(nodes), strict=True))

    def of_places(self, nodes: Collection[int]) -> tuple[frozenset[int], ...]:
        """These nodes by run, by the numbers of its own problem."""
        own: list[set[int]] = [set() for _ in self.runs]
        for node in nodes:
            run, local = self.places[node]
            if local >= 0:
                own[run].add(local)
        return tuple(map(frozenset, own))

    def numbers(self, run: int) -> dict[int, int]:
        """The nodes of a run's own problem, and their numbers here."""
        return {local: node for node, (of_run, local) in enumerate(self.places) if of_run == run and local >= 0}

    @cached_property
    def passed(self) -> frozenset[int]:
        """The nodes of arguments that nobody but backwards holds once the run has returned."""
        outside = {tensor.storage for operator in self.tape.outside for tensor in operator.saved}
        released = {number for call in self.tape.calls for number in call.released} - outside
        return frozenset(
            node
            for node, (run, local) in enumerate(self.places)
            if not self.problem.is_input[node]
            and self.tape.calls[run].inputs.get(self.runs[run].positions.inputs.get(local, -1)) in released
        )

    def of_all(self, saved: Sequence[Collection[int]]) -> frozenset[int]:
        """The nodes that the forward saves where each run saves these of its own."""
        numbers = {place: node for node, place in enumerate(self.places)}
        kept = {numbers[run, node] for run, nodes in enumerate(saved) for node in nodes}
        return self.problem.saving(kept)


class _Builder:
    """Collects the nodes of the problem, with reads and roots by their new numbers."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.places: list[tuple[int, int]] = []

    def between(self, run: int, problem: Problem, reads: Sequence[int], layer: str, **changed: object) -> int:
        """Add an operator that is in no graph, and allocates nothing."""
        number = len(self.places)
        of_none = {"bytes": 0, "workspaces": 0, "seconds": 0.0, "names": f"between.{number}", "layers": layer}
        flags = dict.fromkeys((name for name in _COLUMNS if name.startswith("is_")), False)
        kept = {"is_operator": True, "is_tensor": True, "is_view": True}
        self.add(
            run,
            layer,
            problem,
            0,
            {},
            **{**of_none, **flags, **kept, "roots": number, "reads": tuple(reads), **changed},
        )
        self.places[number] = run, -1
        return number

    def add(
        self, run: int, layer: str, problem: Problem, node: int, number: Mapping[int, int], **changed: object
    ) -> int:
        new = len(self.places)
        for name, column in self.columns.items():
            column.append(getattr(problem, name)[node])
        self.columns["names"][-1] = f"{problem.names[node]}.{run}" if run else problem.names[node]
        self.columns["picks"][-1] = None
        self.columns["runs"][-1] = run
        if layer and problem.layers[node]:
            self.columns["layers"][-1] = layer
        if "reads" not in changed:
            root, source = problem.roots[node], problem.picks[node]
            self.columns["reads"][-1] = tuple(number[read] for read in problem.reads[node])
            self.columns["roots"][-1] = new if root == node else self.columns["roots"][number[root]]
            self.columns["picks"][-1] = None if source is None else number[source]
        self.places.append((run, node))
        for name, value in changed.items():
            self.columns[name][-1] = value
        return new


# What is told of each node.
_COLUMNS = tuple(
    field.name
    for field in fields(Problem)
    if str(field.type).startswith("tuple")
    and field.name not in ("forward_outputs", "backward_outputs", "tangents", "backward_reads")
)


def problem_of_tape(tape: Tape, runs: Sequence[Problem], accumulates: bool = False) -> TapeProblem:
    """The graphs of a tape as one problem.

    Args:
        runs: the problem of each call, for its sizes.
        accumulates: see `compose`.
    """
    if len(runs) == 1:
        return TapeProblem(
            runs[0], (runs[0],), tape, tuple((0, node) for node in range(len(runs[0].names))), accumulates
        )
    built = _Builder()
    numbers: list[dict[int, int]] = [{} for _ in runs]
    # Of each storage that a graph has returned the node; and of all storages the gradient, as far as it is summed.
    made: dict[int, int] = {}
    gradients: dict[int, int] = {}
    held: list[int] = []
    # What graphs are given by others, and their backwards read as it is.
    read: list[int] = []
    around = tape.collectives([[at for at in run.positions.gradients if at is not None] for run in runs])
    moved = _Moved(built)
    # What operators outside of all graphs save, by storage.
    saved_outside: dict[int, int] = {}

    def save_outside(run: int, behind: int) -> None:
        for tensor in (tensor for operator in tape.outside if operator.call == behind for tensor in operator.saved):
            if tensor.storage not in made:
                made[tensor.storage] = _outside(built, run, runs[run], tensor.bytes)
            saved_outside[tensor.storage] = _passed(built, run, runs[run], made[tensor.storage])
            read.append(saved_outside[tensor.storage])

    for run, (call, problem) in enumerate(zip(tape.calls, runs, strict=True)):
        number, given = numbers[run], set(problem.tangents)
        handed: list[int] = []
        held += moved.add(run, problem, around.before[run])
        if not run:
            save_outside(run, -1)
        for node in range(len(problem.names)):
            if problem.is_backward[node] or node in given:
                continue
            storage = call.inputs.get(problem.positions.inputs.get(node, -1)) if problem.is_input[node] else None
            if storage is not None and storage not in tape.given and storage not in made:
                # Of a graph in which nothing is trained, as that of frozen embeddings or of a mask.
                made[storage] = _outside(built, run, problem, problem.bytes[node], call.layer)
            source = None if storage is None else made.get(storage)
            if source is None:
                number[node] = built.add(run, call.layer, problem, node, number)
                continue
            handed.append(source)
            number[node] = built.add(
                run,
                call.layer,
                problem,
                node,
                number,
                reads=(source,),
                roots=built.columns["roots"][source],
                bytes=0,
                kinds=f"{_PASSED} {problem.names[node]}",
                layers=call.layer,
                is_input=False,
                is_operator=True,
                is_view=True,
                is_kept=True,
            )
            if any(problem.is_backward[user] for user in problem.users[node]):
                read.append(number[node])
        if handed:
            held.append(_returned(built, run, problem, handed, call.layer))
        for node, at in zip(problem.forward_outputs, problem.positions.outputs, strict=True):
            storage = None if at is None else call.outputs.get(at)
            if storage is not None and storage not in call.inputs.values() and problem.is_tensor[node]:
                made.setdefault(storage, number[node])
        save_outside(run, run)
        held += moved.add(run, problem, around.after[run])
    held += moved.add(len(runs) - 1, runs[-1], around.end_of_forward)
    tangents: list[int] = []
    outputs: list[int] = []
    # Gradients that go when a group's are reduced.
    sharded: list[tuple[ShardedGroup, int]] = []

    def reduce(run: int, groups: Sequence[Reduced]) -> None:
        for reduced in groups:
            own = [gradient for group, gradient in sharded if group is reduced.group]
            sharded[:] = [entry for entry in sharded if entry[0] is not reduced.group]
            outputs.extend(moved.add(run, runs[run], (reduced.before,), ()))
            outputs.extend(moved.add(run, runs[run], (reduced.copied,), own))
            outputs.extend(moved.add(run, runs[run], (reduced.after,), ()))

    def backward_outside(run: int) -> None:
        behind = [operator for operator in tape.outside if operator.call == run]
        if behind and run == len(runs) - 1:
            # The backward begins with the first reader of a gradient.
            given = {"kinds": _OUTSIDE, "is_input": True, "is_operator": False, "is_backward": True}
            tangents.append(built.between(run, runs[run], (), "", **given))
        for operator in behind:
            reads = [*tangents[:1], *(saved_outside[tensor.storage] for tensor in operator.saved)]
            outputs.extend(moved.add(run, runs[run], (operator.backward,), reads))
            for number, result in operator.passed:
                gradients[result] = moved.take(gradient_name(number))

    for run in reversed(range(len(runs))):
        call, problem, number = tape.calls[run], runs[run], numbers[run]
        backward_outside(run)
        for node, at in zip(problem.tangents, problem.positions.tangents, strict=True):
            gradient = gradients.pop(call.outputs.get(at, -1), None) if at is not None else None
            if gradient is not None:
                number[node] = gradient
            elif run == len(runs) - 1:
                number[node] = built.add(run, call.layer, problem, node, number)
                tangents.append(number[node])
            else:
                number[node] = _outside(built, run, problem, problem.bytes[node], call.layer, is_backward=True)
            if (group := around.given[run]) is not None:
                sharded.append((group, number[node]))
        # The backward begins with the first reader of a gradient.
        prefetched, first = (around.prefetched, tangents[:1]) if run == len(runs) - 1 else ((), [])
        outside = (*around.outside[run], *prefetched, *around.before_backward[run])
        outputs += moved.add(run, problem, outside, first)
        for node in range(len(problem.names)):
            if problem.is_backward[node] and node not in number:
                number[node] = built.add(run, call.layer, problem, node, number)
        added: list[int] = []
        for node, at in zip(problem.backward_outputs, problem.positions.gradients, strict=True):
            storage = None if at is None else call.inputs.get(at)
            owner = None if at is None else around.owners[run].get(at)
            if owner is not None:
                sharded.append((owner, number[node]))
            elif accumulates and (storage is None or storage in tape.given):
                gradient = number[node]
                if storage is not None and storage in gradients:
                    pair = gradients.pop(storage), gradient
                    gradient = _sum(built, run, problem, pair, call.layer)
                if storage is not None and any(storage in earlier.inputs.values() for earlier in tape.calls[:run]):
                    gradients[storage] = gradient
                else:
                    added.append(gradient)
            elif storage is None:
                outputs.append(number[node])
            elif storage in gradients:
                gradients[storage] = _sum(built, run, problem, (gradients[storage], number[node]), call.layer)
            else:
                gradients[storage] = number[node]
        if added:
            changed = {"kinds": _ADDED, "is_tensor": False, "is_view": False, "is_backward": True}
            outputs.append(built.between(run, problem, added, call.layer, **changed))
        reduce(run, around.reduced[run])
    reduce(0, around.last)
    outputs += moved.add(0, runs[0], around.end, ())
    outputs += [*gradients.values(), *moved.left]
    read += moved.held_in_backward
    released = {storage for call in tape.calls for storage in call.released}
    last = [node for storage, node in made.items() if storage not in released]
    pairs = list(zip(runs, numbers, strict=True))
    whole = Problem(
        **{name: tuple(column) for name, column in built.columns.items()},
        forward_outputs=(*held, *last),
        backward_outputs=tuple(outputs),
        tangents=tuple(tangents),
        backward_reads=(*(number[node] for problem, number in pairs for node in problem.backward_reads), *read),
        activations=frozenset(number[node] for problem, number in pairs for node in problem.activations),
        boundaries=frozenset(number[node] for problem, number in pairs for node in problem.boundaries),
        constants=frozenset(number[node] for problem, number in pairs for node in problem.constants),
        positions=Positions(),
    )
    return TapeProblem(whole, tuple(runs), tape, tuple(built.places), accumulates)


class _Moved:
    """The storages of collectives and of operators outside of all graphs, as nodes."""

    def __init__(self, built: _Builder) -> None:
        self._built = built
        self._nodes: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._forward: set[int] = set()
        self._passed: list[int] = []

    @property
    def held_in_backward(self) -> list[int]:
        """Storages of the forward that the backward frees, or that nobody has freed."""
        return [*self._passed, *self._forward.intersection(self.left)]

    @property
    def left(self) -> list[int]:
        """Storages that nobody has freed."""
        return list(self._nodes.values())

    def take(self, name: str) -> int:
        """The node of a storage that is freed when those who read it have run."""
        if name in self._nodes:
            self._taken[name] = self._nodes.pop(name)
        return self._taken[name]

    def add(
        self, run: int, problem: Problem, events: Sequence[Event], backward: Sequence[int] | None = None
    ) -> list[int]:
        """Add the nodes of events.

        Args:
            backward: nodes of the backward that they read; None: they are of the forward.

        Returns:
            Those that free only.
        """
        last: list[int] = []
        for event in events:
            own = {storage.name for storage in event.allocates}
            freed = [self._freed(name) for name in event.frees if name not in own]
            if backward is not None:
                self._passed += self._forward.intersection(freed)
            reads = (*freed, *(backward or ()))
            changed: dict[str, object] = {"kinds": event.kind or _RELEASED, "is_backward": backward is not None}
            layer, workspace = event.layer, {"workspaces": event.workspace}
            for storage in event.allocates:
                kept = {"bytes": storage.bytes, "is_view": False, "is_kept": True, **workspace}
                node = self._nodes[storage.name] = self._built.between(run, problem, reads, layer, **changed, **kept)
                if backward is None:
                    self._forward.add(node)
            done = [self._nodes.pop(name) for name in event.frees if name in own]
            ends = tuple(done) if own else reads
            if ends or (event.workspace and not own):
                none = {"is_tensor": False, "is_view": False, **({} if own else workspace)}
                last.append(self._built.between(run, problem, ends, layer, **changed, **none))
        return last

    def _freed(self, name: str) -> int:
        return self._taken[name] if name in self._taken else self._nodes.pop(name)


def _returned(built: _Builder, run: int, problem: Problem, given: Sequence[int], layer: str) -> int:
    """An operator that reads what a graph was given, which its caller holds until it returns."""
    return built.between(run, problem, given, layer, kinds=_RETURNED, is_tensor=False, is_view=False)


def _outside(
    built: _Builder, run: int, problem: Problem, size: int, layer: str = "", *, is_backward: bool = False
) -> int:
    """A storage that no graph has allocated."""
    own = {"bytes": size, "is_view": False, "is_kept": True, "is_backward": is_backward}
    return built.between(run, problem, (), layer, kinds=_OUTSIDE, **own)


def _passed(built: _Builder, run: int, problem: Problem, source: int) -> int:
    """A storage that is there until an operator outside of all graphs has read it."""
    root = built.columns["roots"][source]
    return built.between(run, problem, (source,), "", kinds=_PASSED, roots=root, is_kept=True)


def _sum(built: _Builder, run: int, problem: Problem, gradients: tuple[int, int], layer: str) -> int:
    """The sum of two gradients of one tensor, in the place of the first."""
    root = built.columns["roots"][gradients[0]]
    return built.between(run, problem, gradients, layer, kinds=_SUMMED, roots=root, is_backward=True)
