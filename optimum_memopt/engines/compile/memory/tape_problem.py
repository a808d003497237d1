"""Links the graphs of a tape into one problem, for a solver that knows nothing of tapes. Pure.

Forwards are in the order of the tape, backwards in reverse order. A graph reads another graph's result through a view
that must not run twice, so no backward recomputes past its own graph's inputs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optimum_memopt.engines.api.run import NOTHING_HELD, HeldUntil
from optimum_memopt.engines.compile.graph.layouts import Layout
from optimum_memopt.engines.compile.graph.problem import Positions, Problem
from optimum_memopt.engines.compile.memory.around_runs import Reduced
from optimum_memopt.engines.compile.memory.tape import Tape, gradient_name
from optimum_memopt.engines.simulator.events import Event
from optimum_memopt.engines.torch_compat import dynamo

# Kinds of operators between graphs: a storage passed on, one made outside of all graphs, arguments kept until a graph
# returns, summed gradients, gradients copied to another layout, gradients accumulated over micro-batches, and released
# buffers of collectives.
_PASSED, _OUTSIDE, _RETURNED, _SUMMED, _COPIED, _ADDED, _RELEASED = (
    "passed",
    "outside",
    "returned",
    "summed",
    "copied",
    "added",
    "released",
)


@dataclass(frozen=True)
class TapeProblem:
    """A tape as one problem.

    Attributes:
        runs: the problem of each of the tape's calls.
        frees_gradients: see `compose`.
        places: for each node, its run and its number in that run's problem; -1 if it is in no graph.
        outputs: bytes of the forward's results that its caller holds after the backward.
    """

    problem: Problem
    runs: tuple[Problem, ...]
    tape: Tape
    places: tuple[tuple[int, int], ...]
    frees_gradients: bool = False
    outputs: int = 0

    @property
    def graphs(self) -> tuple[int, ...]:
        """Returns the index of each run's graph."""
        return tuple(call.graph for call in self.tape.calls)

    def of_runs(self, nodes: Collection[int]) -> tuple[frozenset[int], ...]:
        """Returns the nodes that each run's forward saves if `nodes` are saved, numbered as in its own problem."""
        return tuple(problem.closure(saved) for problem, saved in zip(self.runs, self.of_places(nodes), strict=True))

    def of_places(self, nodes: Collection[int]) -> tuple[frozenset[int], ...]:
        """Returns `nodes` by run, numbered as in the run's own problem."""
        own: list[set[int]] = [set() for _ in self.runs]
        for node in nodes:
            run, local = self.places[node]
            if local >= 0:
                own[run].add(local)
        return tuple(map(frozenset, own))

    def numbers(self, run: int) -> dict[int, int]:
        """Returns the numbers of a run's nodes in the linked problem, by their numbers in its own problem."""
        return {local: node for node, (of_run, local) in enumerate(self.places) if of_run == run and local >= 0}

    @cached_property
    def passed(self) -> frozenset[int]:
        """Returns the nodes of arguments kept alive only by the backward."""
        outside = {tensor.storage for operator in self.tape.outside for tensor in operator.saved}
        released = {number for call in self.tape.calls for number in call.released} - outside
        return frozenset(
            node
            for node, (run, local) in enumerate(self.places)
            if not self.problem.is_input[node]
            and self.tape.calls[run].inputs.get(self.runs[run].positions.inputs.get(local, -1)) in released
        )

    def of_all(self, saved: Sequence[Collection[int]]) -> frozenset[int]:
        """Returns the nodes that the forward saves if each run saves these nodes of its own problem."""
        numbers = {place: node for node, place in enumerate(self.places)}
        kept = {numbers[run, node] for run, nodes in enumerate(saved) for node in nodes}
        return self.problem.saving(kept)


# Columns of an operator that is in no graph and allocates nothing.
_BETWEEN = {
    "bytes": 0,
    "workspaces": 0,
    "seconds": 0.0,
    "picks": None,
    **dict.fromkeys(("is_operator", "is_tensor", "is_view"), True),
    **dict.fromkeys(("is_input", "is_backward", "is_number", "is_kept", "is_statistic"), False),
}
_COLUMNS = (*_BETWEEN, "names", "kinds", "reads", "roots", "layers", "runs")


class _Builder:
    """Collects the nodes of the problem, with reads and roots renumbered."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self.places: list[tuple[int, int]] = []

    def root(self, node: int) -> int:
        root: int = self.columns["roots"][node]
        return root

    def between(
        self, run: int, kind: str, reads: Sequence[int], changed: Mapping[str, object], layer: str = "", node: int = -1
    ) -> int:
        """Add an operator that is in no graph.

        Args:
            changed: columns that differ from `_BETWEEN`.
            node: number of the node in the run's own problem that it stands for; -1: none.
        """
        new = len(self.places)
        own = {"names": f"between.{new}", "kinds": kind, "reads": tuple(reads), "roots": new, "layers": layer}
        return self._append(run, node, {**_BETWEEN, **own, "runs": run, **changed})

    def add(self, run: int, layer: str, problem: Problem, node: int, number: Mapping[int, int]) -> int:
        """Add a node of a run's own problem; `number` maps earlier nodes of the run to their new numbers."""
        root, source = problem.roots[node], problem.picks[node]
        row = {name: getattr(problem, name)[node] for name in _COLUMNS}
        row["names"] = _name_in(problem, node, run)
        row["reads"] = tuple(number[read] for read in problem.reads[node])
        row["roots"] = len(self.places) if root == node else self.root(number[root])
        row["picks"] = None if source is None else number[source]
        row["runs"] = run
        if layer and problem.layers[node]:
            row["layers"] = layer
        return self._append(run, node, row)

    def _append(self, run: int, node: int, row: Mapping[str, object]) -> int:
        for name, column in self.columns.items():
            column.append(row[name])
        self.places.append((run, node))
        return len(self.places) - 1


def _name_in(problem: Problem, node: int, run: int) -> str:
    return f"{problem.names[node]}.{run}" if run else problem.names[node]


def problem_of_tape(tape: Tape, runs: Sequence[Problem], frees_gradients: bool = False) -> TapeProblem:
    """Link the graphs of a tape into one problem.

    Args:
        runs: the problem of each call, with the sizes of that call.
        frees_gradients: see `compose`.
    """
    runs = [run.with_earlier_gradients() if frees_gradients else run.without_earlier_gradients() for run in runs]
    is_alone = len(runs) == 1 and not tape.outside and tape.held_outputs == NOTHING_HELD
    if is_alone and (tape.loss is None or tape.loss.unknown):
        places = tuple((0, node) for node in range(len(runs[0].names)))
        return TapeProblem(runs[0], (runs[0],), tape, places, frees_gradients)
    linked = _LinkedRuns(tape, runs, frees_gradients)
    linked.begin()
    for run in range(len(runs)):
        linked.forward(run)
    linked.hold_results()
    for run in reversed(range(len(runs))):
        linked.backward(run)
    # `problem()` adds the last nodes, so `places` is read after it.
    problem = linked.problem()
    return TapeProblem(problem, tuple(runs), tape, tuple(linked.built.places), frees_gradients, linked.outputs)


class _LinkedRuns:
    """The nodes of all runs, and of the operators between them."""

    def __init__(self, tape: Tape, runs: Sequence[Problem], frees_gradients: bool) -> None:
        self._tape, self._runs, self._frees_gradients = tape, runs, frees_gradients
        self._collectives = tape.collectives([run.positions.gradients for run in runs])
        self.built = _Builder()
        self._moved = _Moved(self.built)
        # Per run: the new numbers of its nodes.
        self._numbers: list[dict[int, int]] = [{} for _ in runs]
        # Nodes of the storages that graphs returned, and of each storage's gradient as summed so far, by storage.
        self._made: dict[int, int] = {}
        self._gradients: dict[int, int] = {}
        self._layouts: dict[int, Layout | None] = {}
        # Originals of the copied gradients in the backward that is being added.
        self._copied: list[int] = []
        # Nodes that operators outside of all graphs save, by storage; and gradients that only these operators read.
        self._saved_outside: dict[int, int] = {}
        self._passed: list[int] = []
        # Gradients that are freed when their sharded group is reduced, with the group.
        self._grouped: list[tuple[object, int]] = []
        self._held: list[int] = []
        # Graph inputs from other graphs that a backward reads directly.
        self._read: list[int] = []
        self._tangents: list[int] = []
        self._outputs: list[int] = []
        # Bytes of held or copied results, by storage, and of the tensors that the training loop computes from them;
        # nodes of the tensors held until the backward ends, and of the previous step's.
        self._result_sizes = {} if tape.held_outputs == NOTHING_HELD else self._result_bytes()
        size = sum(self._result_sizes.values())
        self._loss, self._left = round(tape.held_outputs.loss * size), round(tape.held_outputs.left * size)
        self._results: list[int] = []
        self._earlier: list[int] = []

    @property
    def outputs(self) -> int:
        """Returns the bytes that the forward's caller holds after the backward."""
        return sum(self._result_sizes.values()) + self._left if self._tape.held_outputs.until else 0

    def _result_bytes(self) -> dict[int, int]:
        results, copies, sizes = self._tape.results, self._tape.held_outputs.copies or 1, dict[int, int]()
        for call, problem in zip(self._tape.calls, self._runs, strict=True):
            for node, at in zip(problem.forward_outputs, problem.positions.outputs, strict=True):
                storage = None if at is None else call.outputs.get(at)
                if storage in results and storage not in call.inputs.values() and problem.is_tensor[node]:
                    sizes.setdefault(storage, round(copies * problem.bytes[problem.roots[node]]))
        return sizes

    def begin(self) -> None:
        """Add the previous step's results that the caller still holds, before any forward."""
        if self._tape.held_outputs.until == HeldUntil.NEXT_FORWARD:
            sizes = [*self._result_sizes.values(), *([self._left] if self._left else [])]
            self._earlier = [self._outside(0, size) for size in sizes]

    def hold_results(self) -> None:
        """Add the forward's results that the caller holds in the backward, and the tensors that it computes from them,
        after all forwards."""
        nodes: list[int] = []
        last, held = len(self._runs) - 1, self._tape.held_outputs
        for storage, size in self._result_sizes.items():
            if held.copies:
                nodes.append(self._outside(last, size, source=self._made[storage]))
            elif held.until:
                kept = {"roots": self.built.root(self._made[storage]), "is_kept": True}
                nodes.append(self.built.between(last, _PASSED, (self._made[storage],), kept))
        if self._earlier:
            self._held.append(self._end(last, self._earlier, _RETURNED))
        if self._loss:
            self._held += self._moved.add(last, [Event("", "loss", workspace=self._loss)])
        left = [self._outside(last, self._left)] if self._left else []
        if held.until:
            self._results = [*nodes, *left]
        else:
            self._results = left
            if nodes:
                self._held.append(self._end(last, nodes, _RETURNED))
        self._read += self._results

    def forward(self, run: int) -> None:
        """Add the forward of a run. Forwards are added in order, before any backward."""
        call, problem, number = self._tape.calls[run], self._runs[run], self._numbers[run]
        given = set(problem.tangents)
        handed: list[int] = []
        self._held += self._moved.add(run, self._collectives.runs[run].before)
        if not run:
            self._save_outside(run, -1)
        for node in range(len(problem.names)):
            if problem.is_backward[node] or node in given:
                continue
            source = self._handed_to(run, node)
            if source is None:
                number[node] = self.built.add(run, call.layer, problem, node, number)
                continue
            handed.append(source)
            own = {"names": _name_in(problem, node, run), "roots": self.built.root(source), "is_kept": True}
            kind = f"{_PASSED} {problem.names[node]}"
            number[node] = self.built.between(run, kind, (source,), own, call.layer, node)
            if any(problem.is_backward[user] for user in problem.users[node]):
                self._read.append(number[node])
        if handed:
            # The caller holds a graph's arguments until the graph returns.
            self._held.append(self._end(run, handed, _RETURNED))
        for node, at in zip(problem.forward_outputs, problem.positions.outputs, strict=True):
            storage = None if at is None else call.outputs.get(at)
            if storage is not None and storage not in call.inputs.values() and problem.is_tensor[node]:
                self._made.setdefault(storage, number[node])
        self._save_outside(run, run)
        self._held += self._moved.add(run, self._collectives.runs[run].after)

    def _handed_to(self, run: int, node: int) -> int | None:
        """Returns the node whose storage a run's input is; None if the input existed before the forward."""
        call, problem = self._tape.calls[run], self._runs[run]
        storage = call.inputs.get(problem.positions.inputs.get(node, -1)) if problem.is_input[node] else None
        if storage is None or (storage in self._tape.given and storage not in self._made):
            return None
        if storage not in self._made:
            # Made by a graph in which nothing is trained, such as that of frozen embeddings or of a mask.
            self._made[storage] = self._outside(run, problem.bytes[node], call.layer)
        return self._made[storage]

    def _save_outside(self, run: int, behind: int) -> None:
        """Add the tensors that operators outside of all graphs save after a call, held until their backward."""
        for storage, size in self._tape.saved_behind(behind).items():
            if storage not in self._made:
                self._made[storage] = self._outside(run, size)
            source = self._made[storage]
            kept = {"roots": self.built.root(source), "is_kept": True}
            self._saved_outside[storage] = self.built.between(run, _PASSED, (source,), kept)
            self._read.append(self._saved_outside[storage])

    def backward(self, run: int) -> None:
        """Add the backward of a run. Backwards of later runs are added before it."""
        call, problem, number = self._tape.calls[run], self._runs[run], self._numbers[run]
        around, is_first = self._collectives.runs[run], run == len(self._runs) - 1
        if is_first:
            self._held += self._moved.add(run, self._collectives.end_of_forward)
            if self._collectives.without_results:
                results = [self._made[storage] for storage in self._tape.results if storage in self._made]
                self._held.append(self._end(run, results, _RETURNED))
                self._held += self._moved.add(run, self._collectives.without_results)
        self._backward_outside(run)
        for node, at in zip(problem.tangents, problem.positions.tangents, strict=True):
            number[node] = self._tangent(run, node, at)
            if (group := around.given) is not None:
                self._grouped.append((group, number[node]))
        if self._passed:
            self._outputs.append(self._end(run, self._passed, _RELEASED, is_backward=True))
            self._passed = []
        # A problem's backward begins at the first reader of a tangent.
        prefetched, first = (self._collectives.prefetched, self._tangents[:1]) if is_first else ((), [])
        outside = (*around.outside, *prefetched, *around.before_backward)
        self._outputs += self._moved.add(run, outside, first)
        for node in range(len(problem.names)):
            if problem.is_backward[node] and node not in number:
                number[node] = self.built.add(run, call.layer, problem, node, number)
        added: list[int] = []
        for node, at in zip(problem.backward_outputs, problem.positions.gradients, strict=True):
            self._layouts.setdefault(self.built.root(number[node]), problem.positions.layouts.gradients.get(at))
            added += self._add_gradient(run, number[node], at)
        if added:
            self._outputs.append(self._end(run, added, _ADDED, is_backward=True))
        if problem.tangents and dynamo.holds_tangents():
            held = [*(number[node] for node in problem.tangents), *self._copied]
            self._outputs.append(self._end(run, held, _RELEASED, is_backward=True))
        self._copied = []
        self._reduce(run, around.reduced)

    def _backward_outside(self, run: int) -> None:
        """Add the backwards of operators outside of all graphs that follow a run."""
        behind = [operator for operator in self._tape.outside if operator.call == run]
        first: list[int] = []
        if behind and run == len(self._runs) - 1:
            # A problem's backward begins at the first reader of a tangent.
            given = {"is_input": True, "is_operator": False, "is_backward": True}
            first.append(self.built.between(run, _OUTSIDE, (), given))
            self._tangents += first
        for operator in behind:
            reads = [*first, *(self._saved_outside[tensor.storage] for tensor in operator.saved)]
            self._outputs += self._moved.add(run, (operator.backward,), reads)
            for gradient, storage in operator.passed:
                self._gradients[storage] = self._moved.take(gradient_name(gradient))

    def _tangent(self, run: int, node: int, at: int | None) -> int:
        """Returns the node of the gradient that a backward takes for an output; adds it if no backward returned it."""
        call, problem = self._tape.calls[run], self._runs[run]
        gradient = None if at is None else self._gradients.pop(call.outputs.get(at, -1), None)
        if gradient is not None:
            if not problem.positions.layouts.needs_copy(at, self._layouts.get(self.built.root(gradient))):
                return gradient
            self._copied.append(gradient)
            own = {"bytes": problem.bytes[node], "is_view": False, "is_kept": True, "is_backward": True}
            return self.built.between(run, _COPIED, (gradient,), own, call.layer)
        if run < len(self._runs) - 1:
            return self._outside(run, problem.bytes[node], call.layer, is_backward=True)
        self._tangents.append(self.built.add(run, call.layer, problem, node, self._numbers[run]))
        return self._tangents[-1]

    def _add_gradient(self, run: int, gradient: int, at: int | None) -> Iterator[int]:
        """Pass on the gradient that a backward returns for an argument; yields it if it is freed at once."""
        calls, gradients = self._tape.calls, self._gradients
        storage = None if at is None else calls[run].inputs.get(at)
        owner = None if at is None else self._collectives.runs[run].owners.get(at)
        if owner is not None:
            self._grouped.append((owner, gradient))
        elif self._frees_gradients and (storage is None or storage in self._tape.given):
            if storage is not None and storage in gradients:
                gradient = self._sum(run, gradients.pop(storage), gradient)
            if storage is not None and any(storage in earlier.inputs.values() for earlier in calls[:run]):
                gradients[storage] = gradient
            else:
                yield gradient
        elif storage is None:
            self._outputs.append(gradient)
        elif storage in gradients:
            gradients[storage] = self._sum(run, gradients[storage], gradient)
        elif run and storage not in {*self._tape.given, *self._tape.returned[run]}:
            # Only an operator outside of all graphs reads it.
            self._passed.append(gradient)
        else:
            gradients[storage] = gradient

    def _reduce(self, run: int, groups: Sequence[Reduced]) -> None:
        for reduced in groups:
            own = [gradient for group, gradient in self._grouped if group is reduced.group]
            self._grouped = [entry for entry in self._grouped if entry[0] is not reduced.group]
            for event, read in ((reduced.before, ()), (reduced.copied, own), (reduced.after, ())):
                self._outputs += self._moved.add(run, (event,), read)

    def problem(self) -> Problem:
        """Returns the linked problem, once each run's forward and backward have been added."""
        self._reduce(0, self._collectives.last)
        self._outputs += self._moved.add(0, self._collectives.end, ())
        if self._results:
            self._outputs.append(self._end(0, self._results, _RELEASED, is_backward=True))
        self._outputs += [*self._gradients.values(), *self._moved.left]
        self._read += self._moved.held_in_backward
        released = {storage for call in self._tape.calls for storage in call.released}
        if self._tape.held_outputs.copies:
            released |= self._result_sizes.keys()
        if self._collectives.without_results:
            released |= self._tape.results
        last = [node for storage, node in self._made.items() if storage not in released]

        def all_of(nodes_of: Callable[[Problem], Iterable[int]]) -> Iterator[int]:
            pairs = zip(self._runs, self._numbers, strict=True)
            return (number[node] for problem, number in pairs for node in nodes_of(problem))

        return Problem(
            **{name: tuple(column) for name, column in self.built.columns.items()},
            forward_outputs=(*self._held, *last),
            backward_outputs=tuple(self._outputs),
            tangents=tuple(self._tangents),
            backward_reads=(*all_of(lambda problem: problem.backward_reads), *self._read),
            activations=frozenset(all_of(lambda problem: problem.activations)),
            boundaries=frozenset(all_of(lambda problem: problem.boundaries)),
            constants=frozenset(all_of(lambda problem: problem.constants)),
            writes=any(problem.writes for problem in self._runs),
            positions=Positions(),
            conversions={
                number[activation]: conversion.numbered(number.__getitem__)
                for problem, number in zip(self._runs, self._numbers, strict=True)
                for activation, conversion in problem.conversions.items()
            },
            accumulations=frozenset(all_of(lambda problem: problem.accumulations)),
        )

    def _outside(
        self, run: int, size: int, layer: str = "", *, source: int | None = None, is_backward: bool = False
    ) -> int:
        """Add a storage that no graph has allocated, computed from `source` if given."""
        own = {"bytes": size, "is_view": False, "is_kept": True, "is_backward": is_backward}
        return self.built.between(run, _OUTSIDE, () if source is None else (source,), own, layer)

    def _end(self, run: int, nodes: Sequence[int], kind: str, *, is_backward: bool = False) -> int:
        """Add an operator that reads `nodes`, so that they are held until then."""
        own = {"is_tensor": False, "is_view": False, "is_backward": is_backward}
        return self.built.between(run, kind, nodes, own, self._tape.calls[run].layer)

    def _sum(self, run: int, first: int, second: int) -> int:
        """Add the in-place sum of two gradients of one tensor, in the storage of the first."""
        own = {"roots": self.built.root(first), "is_backward": True}
        return self.built.between(run, _SUMMED, (first, second), own, self._tape.calls[run].layer)


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
        """Returns storages of the forward that the backward frees, or that are never freed."""
        return [*self._passed, *self._forward.intersection(self.left)]

    @property
    def left(self) -> list[int]:
        """Returns storages that have not been freed."""
        return list(self._nodes.values())

    def take(self, name: str) -> int:
        """Returns the node of a storage, which is freed after its readers instead of by an event."""
        if name in self._nodes:
            self._taken[name] = self._nodes.pop(name)
        return self._taken[name]

    def add(self, run: int, events: Sequence[Event], backward: Sequence[int] | None = None) -> list[int]:
        """Add the nodes of events.

        Args:
            backward: nodes that the events read in the backward; None: the events are in the forward.

        Returns:
            The nodes that allocate nothing: they free storages or hold a workspace.
        """
        last: list[int] = []
        for event in events:
            own = {storage.name for storage in event.allocates}
            freed = [self._freed(name) for name in event.frees if name not in own]
            if backward is not None:
                self._passed += self._forward.intersection(freed)
            reads, kind = (*freed, *(backward or ())), event.kind or _RELEASED
            changed = {"is_view": False, "is_backward": backward is not None}
            working = {**changed, "workspaces": event.workspace}
            for storage in event.allocates:
                kept = {**working, "bytes": storage.bytes, "is_kept": True}
                node = self._nodes[storage.name] = self._built.between(run, kind, reads, kept, event.layer)
                if backward is None:
                    self._forward.add(node)
            done = [self._nodes.pop(name) for name in event.frees if name in own]
            ends = tuple(done) if own else reads
            if ends or (event.workspace and not own):
                none = {**(changed if own else working), "is_tensor": False}
                last.append(self._built.between(run, kind, ends, none, event.layer))
        return last

    def _freed(self, name: str) -> int:
        return self._taken[name] if name in self._taken else self._nodes.pop(name)
