"""The memory of a loss computed outside of the model's forward: a teacher's logits, a divergence, metrics. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from optimum_memopt.engines.compile.memory.around_runs import Collectives
from optimum_memopt.engines.simulator.events import Event


@dataclass(frozen=True)
class LossEvents:
    """The events of a step outside of the model's forward and backward.

    Attributes:
        before: events before the model's forward.
        behind: events after the model's forward, until its results are dropped.
        without_results: events from then on, until the backward of the loss begins.
        backward: events of the loss's backward, until the model's backward gets its tangents.
        end: events from the start of the model's backward on; they are composed at its end.
        resident: bytes held when the step's first model forward begins.
    """

    before: tuple[Event, ...] = ()
    behind: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    end: tuple[Event, ...] = ()
    without_results: tuple[Event, ...] = ()
    resident: int = 0

    def scaled(self, factor: float) -> "LossEvents":
        """Returns the events of a batch that is `factor` times as large."""

        def size(number: int) -> int:
            return round(factor * number)

        before, behind, backward, end, without_results = (
            tuple(event.resized(size) for event in part)
            for part in (self.before, self.behind, self.backward, self.end, self.without_results)
        )
        return LossEvents(before, behind, backward, end, without_results, size(self.resident))


@dataclass(frozen=True)
class EagerLoss:
    """A loss that is computed outside of the model's forward.

    Attributes:
        name: the function that computes it, `Distiller.compute_loss`.
        events_at: returns the events for batch sizes by argument and dimension, `input_ids_dim0`.
        unknown: why its memory is unknown; empty if it is known.
        sizes: sizes of the batch.
    """

    name: str
    events_at: Callable[[Mapping[str, int]], LossEvents] = lambda _: LossEvents()
    unknown: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)

    def at(self, sizes: Mapping[str, int]) -> "EagerLoss":
        return replace(self, sizes=sizes)

    @property
    def events(self) -> LossEvents:
        return self.events_at(self.sizes)

    def around(self, collectives: Collectives) -> Collectives:
        """Returns the events around a tape's calls, with those of the loss added."""
        if self.unknown:
            return collectives
        events, (first, *_), (*_, last) = self.events, collectives.runs, collectives.runs
        runs = list(collectives.runs)
        runs[0] = replace(first, before=(*events.before, *first.before))
        runs[-1] = replace(runs[-1], outside=(*events.backward, *last.outside))
        return replace(
            collectives,
            runs=tuple(runs),
            end_of_forward=(*collectives.end_of_forward, *events.behind),
            end=(*collectives.end, *events.end),
            without_results=events.without_results,
        )

    @property
    def caveat(self) -> str:
        """Returns a note that the loss is not counted, and why; empty if it is counted."""
        return f"not counted: {self.name} ({self.unknown})" if self.unknown else ""
