"""Holds a budget for every batch of a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.devices import Device
from optimum_memopt.engines.compile.budget.in_step import Step, costs_of, step_around
from optimum_memopt.engines.compile.budget.largest_sizes import larger_sizes
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.engines.run import LargestBatch, Run
from optimum_memopt.memory.peak_monitor import held_bytes
from optimum_memopt.sizes import Budget, gib_text


class StepBudget:
    """The budget of one model's steps under one plan, for every batch that the plan is made for.

    Args:
        run: the training run, asked at each step.
        target: the device that steps are planned for; None: where the model lies.

    Attributes:
        largest: the largest batch that the plan is made for; None: it is not known.
        solved_for: sizes that the plan in force was solved for, by the plan table's names.
    """

    def __init__(self, run: Callable[[], Run], target: Device | None = None) -> None:
        self._run = run
        self._target = target
        # None until it was asked for: what is available shrinks while training runs.
        self._bytes: int | None = None
        self.largest: LargestBatch | None = None
        self._margin = 0
        self._resident: int | None = None
        # What the process held when the run's first plan was made, and when this one was.
        self._first_constant: int | None = None
        self._constant: int | None = None
        self._peaks: dict[frozenset[tuple[str, int]], int] = {}
        self.solved_for: Mapping[str, int] = {}

    def for_another(self, largest: LargestBatch | None) -> "StepBudget":
        """The same bytes for another plan.

        Args:
            largest: batch that the plan is made for; None: that of the run.
        """
        other = StepBudget(self._run, self._target)
        other.largest, other._bytes, other._margin = largest, self._bytes, self._margin
        other._first_constant = self._constant if self._first_constant is None else self._first_constant
        return other

    def read_largest(self) -> None:
        """Read the run's largest batch; not while a model is traced, where no tensor can be read."""
        if self.largest is None:
            self.largest = self._run().largest_batch()

    def step(self, model: torch.nn.Module, inputs: Mapping[str, object], budget: Budget) -> Step:
        """See `step_around`; the budget's bytes are those of the first time."""
        found = self._without_second_room(step_around(model, inputs, budget, self._run(), self._target))
        self._bytes = found.bytes if self._bytes is None else self._bytes
        self._peaks.clear()
        self._resident, self._constant = found.resident, found.outside.constant
        return replace(found, bytes=self._bytes, largest=self.largest, margin=self._margin)

    def _without_second_room(self, step: Step) -> Step:
        """A plan that is made later finds the process grown into the room that the first one has left for it."""
        if self._first_constant is None:
            return step
        grown = step.outside.constant - self._first_constant
        if not 0 < grown <= step.room:
            return step
        outside = replace(step.outside, constant=self._first_constant)
        return replace(step, outside=outside, resident=step.resident - grown)

    def costs(self, graph: AnalyzedGraph, device: torch.device, fused: bool) -> Costs:
        """See `costs_of`."""
        return costs_of(graph, device, fused, self._target)

    def resident(self, device: torch.device) -> int:
        """Bytes that the process holds without the optimizer's states: when a plan was solved for, else now."""
        if self._resident is None:
            return held_bytes(device) if self._target is None else self._target.libraries
        return self._resident

    def check(self, predictor: StepMemoryPredictor) -> str:
        """A line where the plan that was just compiled passes the budget all the same; empty where it does not.

        The solver knows a graph as PyTorch runs it, operator by operator, and each graph of a forward alone. What the
        plan takes beyond the budget is a margin for the next plan.

        Args:
            predictor: of that plan, right after its first forward.
        """
        self.solved_for = larger_sizes(predictor.first, {name: name for name in predictor.first}, self.largest)
        peak = self._peak(predictor, self.solved_for)
        if self._bytes is None or peak <= self._bytes:
            return ""
        excess = peak - self._bytes
        self._margin += excess
        return (
            f"what was compiled takes {gib_text(peak)}, {gib_text(excess)} over the budget, since a compiler orders "
            "operators by itself, graphs are planned one by one, and CUDA's allocator gives tensors larger blocks"
        )

    def is_within(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> bool:
        """Whether a batch's step is within the budget.

        Args:
            predictor: of the plan in force.
            inputs: keyword arguments of the forward.
        """
        return self._bytes is None or self._peak(predictor, predictor.sizes_of(inputs)) <= self._bytes

    def excess(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> str:
        """A line about a batch whose step would pass the budget; empty where it does not.

        Args:
            predictor: of the plan in force.
            inputs: keyword arguments of the forward.
        """
        sizes = predictor.sizes_of(inputs)
        is_solved = all(size <= self.solved_for.get(name, 0) for name, size in sizes.items())
        if self._bytes is None or is_solved or (peak := self._peak(predictor, sizes)) <= self._bytes:
            return ""
        shown = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
        return (
            f"a batch with {shown} would take {gib_text(peak)}, over the budget of {gib_text(self._bytes)}: solving "
            "again for it"
        )

    def _peak(self, predictor: StepMemoryPredictor, sizes: Mapping[str, int]) -> int:
        key = frozenset(sizes.items())
        if key not in self._peaks:
            run = self._run()
            step = sizes, run.optimizer, run.gradient_accumulation
            blocks = predictor.allocator_peak(*step)
            self._peaks[key] = max(predictor.footprint(*step).peak, blocks.allocated if blocks is not None else 0)
        return self._peaks[key]
