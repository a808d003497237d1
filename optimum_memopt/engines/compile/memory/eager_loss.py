"""The memory of a loss that a training step computes outside of the model's forward: a teacher's logits, a divergence,
metrics. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from optimum_memopt.engines.compile.memory.around_runs import Collectives
from optimum_memopt.engines.compile.memory.events import Event


@dataclass(frozen=True)
class LossEvents:
    """The events of a step outside of the model's forward and its backward.

    Attributes:
        before: the forward.
        behind: the forward, until the backward of the loss begins.
        backward: of the loss, until the model's own is given its gradients.
        end: of the backward.
        resident: bytes that are held when the forward of the step begins to run for the first time.
    """

    before: tuple[Event, ...] = ()
    behind: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    end: tuple[Event, ...] = ()
    resident: int = 0

    def scaled(self, factor: float) -> "LossEvents":
        """Returns the events of a batch that is so many times as large."""

        def part(events: tuple[Event, ...]) -> tuple[Event, ...]:
            return tuple(
                event._replace(
                    allocates=tuple(each._replace(bytes=round(factor * each.bytes)) for each in event.allocates),
                    workspace=round(factor * event.workspace),
                )
                for event in events
            )

        parts = part(self.before), part(self.behind), part(self.backward), part(self.end)
        return LossEvents(*parts, resident=round(factor * self.resident))


@dataclass(frozen=True)
class EagerLoss:
    """A loss that is computed outside of the model's forward.

    Attributes:
        name: of what computes it, `Distiller.compute_loss`.
        events_at: the events for a batch of these sizes, by the names of the forward's arguments, `input_ids_dim0`.
        unknown: why its memory is not known; empty where it is.
        sizes: of the batch.
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
        """Returns the events around the calls of a tape, with those of the loss."""
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
        )

    @property
    def caveat(self) -> str:
        """Returns what is not counted, and why; empty where it is counted."""
        return f"not counted: {self.name} ({self.unknown})" if self.unknown else ""
