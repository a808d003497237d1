"""A step of plain PyTorch, as a recorder saw it: its events, their phases and modules."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from optimum_memopt.engines.api.predictions import (
    CATEGORIES,
    OTHER,
    POST_BACKWARD,
    POST_FORWARD,
    POST_OPTIMIZER_STEP,
    PRE_FORWARD,
    Group,
    Phase,
    StepTimeline,
)
from optimum_memopt.engines.simulator.events import (
    Event,
    StepEvents,
    Storage,
    bytes_by_category,
    bytes_during,
    groups,
    held_before,
    held_during,
)
from optimum_memopt.engines.simulator.work import Work

# Phases of a step.
FORWARD, BACKWARD, OPTIMIZER_STEP = "forward", "backward", "optimizer"
# Phase of modules that a step calls without gradients: reference models, generation.
NO_GRAD = "no-grad"


@dataclass(frozen=True)
class LiveRun:
    """The events of a step, including the allocations of tensors that existed before it.

    Attributes:
        events: in order.
        phases: the phase of each event: `FORWARD`, `BACKWARD`, `OPTIMIZER_STEP`, `NO_GRAD`, or a name that the step
            chose.
        modules: path of the innermost module that each event's operator belongs to.
        trained: names of the parameters that got a gradient.
        calls: the work of each operator that is not a view, in order; empty unless `LiveRecorder.records_work` is set.
        marks: moments that the step marked, each with the index of the event that begins there.
    """

    events: tuple[Event, ...]
    phases: tuple[str, ...]
    modules: tuple[str, ...] = ()
    trained: frozenset[str] = frozenset()
    calls: tuple[Work, ...] = ()
    marks: tuple[tuple[int, Hashable], ...] = ()

    @cached_property
    def during(self) -> list[int]:
        """Returns the bytes held during each event."""
        return bytes_during(self.events)[0]

    @property
    def peak(self) -> int:
        return max(self.during)

    @property
    def peak_at(self) -> int:
        """Returns the index of the first event at the peak."""
        return self.during.index(self.peak)

    @cached_property
    def begin(self) -> int:
        """Returns the index of the first operator's event; earlier events allocate what existed before the step."""
        return next((at for at, event in enumerate(self.events) if event.operator), len(self.events))

    def split(self) -> tuple[tuple[Storage, ...], tuple[Event, ...]]:
        """Returns the storages held before the first operator, and the events from that operator on."""
        return tuple(held_before(self.events[: self.begin]).values()), self.events[self.begin :]

    def between(self, begin: int, end: int) -> Iterator[Event]:
        """Yields the events between two marks, without storages that are counted elsewhere (0 bytes here)."""
        for event in self.events[begin:end]:
            allocates = tuple(storage for storage in event.allocates if storage.bytes)
            frees = tuple(name for name in event.frees if name in self._counted)
            if allocates or event.workspace or frees:
                yield event._replace(allocates=allocates, frees=frees)

    @cached_property
    def _counted(self) -> frozenset[str]:
        return frozenset(storage.name for event in self.events for storage in event.allocates if storage.bytes)

    @property
    def micro_batch(self) -> StepEvents:
        """Returns one forward and its backward, without what existed before."""
        events, phases = self.events[self.begin :], self.phases[self.begin :]
        return StepEvents(events, phases.index(BACKWARD) - 1)

    @property
    def peaks(self) -> dict[str, int]:
        """Returns the peak of each phase, ordered by first operator; phases without operators come last."""
        of_operators = (phase for phase, event in zip(self.phases, self.events, strict=True) if event.operator)
        peaks = dict.fromkeys((*of_operators, *self.phases), 0)
        for phase, size in zip(self.phases, self.during, strict=True):
            peaks[phase] = max(peaks[phase], size)
        return peaks

    def timeline(self, sizes: Mapping[str, int], constant: int = 0) -> StepTimeline:
        """Returns the timeline of the step operator by operator, with the optimizer's step as one entry.

        Args:
            sizes: sizes of the batch, by name.
            constant: bytes that are always held and belong to no event.
        """
        held = [{**now, OTHER: now[OTHER] + constant} for now in bytes_by_category(self.events)]
        shown = [
            at
            for at, (event, phase) in enumerate(zip(self.events, self.phases, strict=True))
            if (event.operator or at == self.peak_at) and phase != OPTIMIZER_STEP
        ]
        updates = [at for at, phase in enumerate(self.phases) if phase == OPTIMIZER_STEP] or [len(self.events) - 1]
        update = max(updates, key=lambda at: self.during[at])
        entries = [*shown, update]
        at = max(entries, key=lambda entry: self.during[entry])
        always = [Group(OTHER, "", 0, constant)] if constant else []
        alive = sorted((*always, *groups(held_during(self.events, at))), key=lambda group: -group.bytes)
        backward = [place for place, entry in enumerate(shown) if self.phases[entry] == BACKWARD]
        return StepTimeline(
            operators=(*(self.events[entry].operator for entry in shown), "optimizer step"),
            layers=(*(self.events[entry].layer for entry in shown), ""),
            held={name: tuple(held[entry][name] for entry in entries) for name in CATEGORIES},
            backward_at=min(backward, default=len(shown)),
            alive=tuple(alive),
            phases=self._logged_phases(constant),
            sizes=dict(sizes),
        )

    def _logged_phases(self, constant: int) -> tuple[Phase, ...]:
        """Returns the phases that memory is logged for."""
        count = len(self.events)
        backward, update = (
            next((at for at, phase in enumerate(self.phases) if phase == begun), count)
            for begun in (BACKWARD, OPTIMIZER_STEP)
        )
        ends = {PRE_FORWARD: self.begin, POST_FORWARD: backward, POST_BACKWARD: update, POST_OPTIMIZER_STEP: count}
        return tuple(
            Phase(
                name, constant + bytes_during(self.events[:end])[1], constant + max(self.during[begin:end], default=0)
            )
            for begin, (name, end) in zip((0, *ends.values()), ends.items(), strict=False)
        )
