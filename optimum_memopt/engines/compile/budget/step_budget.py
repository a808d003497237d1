"""Holds a budget for every batch of a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from optimum_memopt.engines.base import Run
from optimum_memopt.engines.compile.budget.in_step import Step, step_around
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.sizes import Budget, gib_text


class StepBudget:
    """The budget of one model's steps, for every batch.

    Args:
        run: the training run, asked at each step.
    """

    def __init__(self, run: Callable[[], Run]) -> None:
        self._run = run
        # None until it was asked for: what is available shrinks while training runs.
        self._bytes: int | None = None
        self._within: set[frozenset[tuple[str, int]]] = set()

    def step(self, model: torch.nn.Module, inputs: Mapping[str, object], budget: Budget) -> Step:
        """See `step_around`; the budget's bytes are those of the first time."""
        found = step_around(model, inputs, budget, self._run())
        self._bytes = found.bytes if self._bytes is None else self._bytes
        self._within.clear()
        return replace(found, bytes=self._bytes)

    def excess(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> str:
        """A line about a batch whose step would pass the budget; empty where it does not.

        Args:
            predictor: of the plan in force.
            inputs: keyword arguments of the forward.
        """
        sizes = predictor.sizes_of(inputs)
        key = frozenset(sizes.items())
        if self._bytes is None or key in self._within:
            return ""
        run = self._run()
        peak = predictor.footprint(sizes, run.optimizer, run.gradient_accumulation).peak
        if peak <= self._bytes:
            self._within.add(key)
            return ""
        shown = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
        return (
            f"a batch with {shown} would take {gib_text(peak)}, over the budget of {gib_text(self._bytes)}: solving "
            "again for it"
        )
