"""Keeps the numbers of a run that other callbacks report, for the page about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optimum_memopt.callbacks.reporting import METRIC_PREFIX

_PHASES = ("pre_forward", "post_forward", "pre_backward", "post_backward", "post_optimizer_step")
# On CUDA torch's allocator, else resident memory.
_HELD, _PEAKS = ("allocated_mib", "resident_mib"), ("max_allocated_mib", "peak_resident_mib")
_DENSITY = "density/"
_MOST_POINTS = 512
_T = TypeVar("_T")


@dataclass(frozen=True)
class MeasuredPhase:
    """A phase of a step, in MiB.

    Attributes:
        name: `post_forward`.
        held: at its end.
        peak: the most since the phase before.
    """

    name: str
    held: float
    peak: float


@dataclass(frozen=True)
class MeasuredStep:
    """The phases of one step, and how many optimizer steps there had been with it."""

    step: int
    phases: tuple[MeasuredPhase, ...]

    @property
    def peak(self) -> float:
        return max(phase.peak for phase in self.phases)


class CollectingCallback(TrainerCallback):
    """Keeps what the memory phases and the input density report, on the world's rank 0.

    Attributes:
        phases: of the step with the highest peak that was measured; the first step, which compiles, only where there
            is no other.
        densities: percent of each input that is not padding, by step; of a long run some of the steps.
    """

    def __init__(self) -> None:
        self.phases: MeasuredStep | None = None
        self.densities: dict[str, list[tuple[int, float]]] = {}
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.phases, self.densities, self._first_step = None, {}, state.global_step + 1

    def on_memopt_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float],
        **kwargs: Any,
    ) -> None:
        """See `callbacks.trackers`."""
        values = {name.removeprefix(METRIC_PREFIX): value for name, value in logs.items()}
        step = state.global_step
        if phases := _phases(values):
            found, kept = MeasuredStep(step, phases), self.phases
            if kept is None or kept.step == self._first_step or found.peak > kept.peak:
                self.phases = found
        for name, value in values.items():
            if name.startswith(_DENSITY):
                points = [*self.densities.get(name.removeprefix(_DENSITY), ()), (step, value)]
                self.densities[name.removeprefix(_DENSITY)] = thinned(points, _MOST_POINTS)


def thinned(points: Sequence[_T], most: int) -> list[_T]:
    """Every second of the points, where there are more than `most`; the last is one of them."""
    return list(points) if len(points) <= most else [*points[:-1:2], points[-1]]


def _phases(values: Mapping[str, float]) -> tuple[MeasuredPhase, ...]:
    found = []
    for phase in _PHASES:
        held = next((values[f"{phase}/{name}"] for name in _HELD if f"{phase}/{name}" in values), None)
        peak = next((values[f"{phase}/{name}"] for name in _PEAKS if f"{phase}/{name}" in values), None)
        if held is not None and peak is not None:
            found.append(MeasuredPhase(phase, held, peak))
    return tuple(found)
