"""A training step's memory by category, operator by operator: its graphs, and all that is held beside them. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from optimum_memopt.engines.api.predictions import (
    BATCH,
    CATEGORIES,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    POST_BACKWARD,
    POST_FORWARD,
    POST_OPTIMIZER_STEP,
    PRE_BACKWARD,
    PRE_FORWARD,
    SAVED,
    TEMPORARY,
    Group,
    Phase,
    StepTimeline,
)
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.graph_run import Event, GraphRun, Held, Memory
from optimum_memopt.engines.compile.memory.timeline import Prediction

_ByCategory = Mapping[str, int]


@dataclass(frozen=True)
class PredictedRun:
    """One run of one graph.

    Attributes:
        run: its operators.
        prediction: what they hold.
        kept: bytes of what the graph before has returned and only the backward of this one reads.
    """

    run: GraphRun
    prediction: Prediction
    kept: int = 0


@dataclass(frozen=True)
class _Half:
    """The forward or the backward of one graph.

    Attributes:
        before: events of the graph before the first of these.
        events: in order.
        base: bytes by category that are held beside the graph.
    """

    before: tuple[Event, ...]
    events: tuple[Event, ...]
    base: _ByCategory

    @cached_property
    def held(self) -> tuple[_ByCategory, ...]:
        """Bytes by category while each operator runs."""
        found = []
        for event, memory in self._replay():
            now = {name: self.base.get(name, 0) + memory.bytes[name] for name in CATEGORIES}
            now[TEMPORARY] += event.workspace.bytes if event.workspace else 0
            found.append(now)
        return tuple(found)

    def storages(self, index: int) -> tuple[Held, ...]:
        """What the graph holds while an operator runs."""
        for number, (event, memory) in enumerate(self._replay()):
            if number == index:
                return (*memory.held.values(), *([event.workspace] if event.workspace else []))
        return ()

    def peak(self, otherwise: int) -> int:
        """The most that is held, in bytes; without operators `otherwise`."""
        return max((sum(now.values()) for now in self.held), default=otherwise)

    def _replay(self) -> Iterator[tuple[Event, Memory]]:
        memory = Memory()
        for event in self.before:
            memory.begin(event)
            memory.end(event)
        for event in self.events:
            memory.begin(event)
            yield event, memory
            memory.end(event)


def step_timeline(
    runs: Sequence[PredictedRun], around: Footprint, sizes: Mapping[str, int], gradients: int = 0
) -> StepTimeline:
    """A step whose graphs run one after the other; its peak is that of `around`.

    Args:
        runs: in the order of the forward.
        around: the parts of the step, with the activations of `runs`.
        sizes: of the batch.
        gradients: there when the backward begins, and not yet in the forward.
    """
    always = {
        OTHER: around.constant,
        PARAMETERS: around.parameters + around.buffers,
        OPTIMIZER: around.optimizer,
        BATCH: around.batch,
    }
    in_graphs = {**always, GRADIENTS: around.accumulated, SAVED: around.other_forwards}
    in_optimizer = {**always, GRADIENTS: around.gradients, TEMPORARY: around.step}
    forwards, backwards = _halves(runs, in_graphs, gradients)
    halves = [*forwards, *backwards]
    held = [*(now for half in halves for now in half.held), in_optimizer]
    events = [*(event for half in halves for event in half.events), Event("optimizer step")]
    return StepTimeline(
        operators=tuple(event.operator for event in events),
        layers=tuple(event.layer for event in events),
        held={name: tuple(now.get(name, 0) for now in held) for name in CATEGORIES},
        backward_at=sum(len(half.events) for half in forwards),
        alive=_alive(halves, in_optimizer, [sum(now.values()) for now in held]),
        phases=_phases(runs, forwards, backwards, in_graphs, in_optimizer),
        sizes=dict(sizes),
        counts=runs[0].run.counts if runs else "operators",
    )


def _halves(runs: Sequence[PredictedRun], base: _ByCategory, gradients: int) -> tuple[list[_Half], list[_Half]]:
    """Forwards and backwards, each in the order in which they run; counted as `activations_of` does."""
    forwards, backwards = [], []
    before, passed = 0, 0
    tangents = sum(each.prediction.tangents for each in runs[:-1])
    returned = sum(each.prediction.backward.end for each in runs) - tangents
    for each in runs:
        run, found = each.run, each.prediction
        returned -= found.backward.end
        forwards.append(_Half((), run.forward, _plus(base, {SAVED: before, TEMPORARY: passed})))
        beside = {SAVED: before + each.kept, GRADIENTS: max(0, returned) + gradients}
        backwards.append(_Half((*run.forward, run.between), run.backward, _plus(base, beside)))
        returned += found.tangents
        before, passed = before + found.stashed + each.kept, found.returned
    return forwards, backwards[::-1]


def _plus(base: _ByCategory, more: _ByCategory) -> _ByCategory:
    return {name: base.get(name, 0) + more.get(name, 0) for name in {**base, **more}}


def _alive(halves: Sequence[_Half], in_optimizer: _ByCategory, totals: Sequence[int]) -> tuple[Group, ...]:
    """What is held at the peak, largest first."""
    index = totals.index(max(totals))
    for half in halves:
        if index < len(half.events):
            groups = [*_whole(half.base), *_groups(half.storages(index))]
            break
        index -= len(half.events)
    else:
        groups = _whole(in_optimizer)
    return tuple(sorted(groups, key=lambda group: -group.bytes))


def _whole(by_category: _ByCategory) -> list[Group]:
    return [Group(name, "", 0, size) for name, size in by_category.items() if size]


def _groups(storages: Iterable[Held]) -> list[Group]:
    found: dict[tuple[str, str], list[Held]] = {}
    for storage in storages:
        found.setdefault((storage.category, storage.name if storage.category != GRADIENTS else ""), []).append(storage)
    return [
        Group(
            category,
            name,
            len(of_kind),
            sum(storage.bytes for storage in of_kind),
            tuple(dict.fromkeys(storage.layer for storage in of_kind if storage.layer)),
        )
        for (category, name), of_kind in found.items()
        if any(storage.bytes for storage in of_kind)
    ]


def _phases(
    runs: Sequence[PredictedRun],
    forwards: Sequence[_Half],
    backwards: Sequence[_Half],
    in_graphs: _ByCategory,
    in_optimizer: _ByCategory,
) -> tuple[Phase, ...]:
    """What is held at the borders of forward, backward and the optimizer's step, and the most in between."""
    before = sum(in_graphs.values())
    last = runs[-1].prediction
    forward = sum(forwards[-1].base.values()) + last.forward.end
    saved = sum(each.prediction.stashed + each.kept for each in runs)
    # Gradients are added to those of earlier micro-batches, whose memory is theirs.
    gradients = in_optimizer[GRADIENTS]
    after = before - in_graphs[GRADIENTS] - in_graphs[SAVED] + gradients
    return (
        Phase(PRE_FORWARD, before, before),
        Phase(POST_FORWARD, forward, max(half.peak(before) for half in forwards)),
        Phase(PRE_BACKWARD, before + saved + last.tangents, max(forward, before + saved + last.tangents)),
        Phase(POST_BACKWARD, after, max(half.peak(before) for half in backwards)),
        Phase(POST_OPTIMIZER_STEP, after, sum(in_optimizer.values())),
    )
