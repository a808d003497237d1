"""Holds a budget for every batch of a run."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from optimum_memopt.engines.base import LargestBatch, Run
from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.costs import Costs
from optimum_memopt.engines.compile.budget.devices import Device
from optimum_memopt.engines.compile.budget.in_step import Step, costs_of, step_around
from optimum_memopt.engines.compile.budget.largest_sizes import larger_sizes
from optimum_memopt.engines.compile.memory.footprint import resident
from optimum_memopt.engines.compile.memory.step_memory import StepMemoryPredictor
from optimum_memopt.sizes import Budget, gib_text


class StepBudget:
    """The budget of one model's steps, for every batch.

    Args:
        run: the training run, asked at each step.
        target: the device that steps are planned for; None: where the model lies.
    """

    def __init__(self, run: Callable[[], Run], target: Device | None = None) -> None:
        self._run = run
        self._target = target
        # None until it was asked for: what is available shrinks while training runs.
        self._bytes: int | None = None
        self._largest: LargestBatch | None = None
        self._margin = 0
        self._resident: int | None = None
        self._within: set[frozenset[tuple[str, int]]] = set()
        # Sizes of the batch that the plan in force was solved for.
        self._solved_for: Mapping[str, int] = {}

    def read_largest(self) -> None:
        """Read the run's largest batch; not while a model is traced, where no tensor can be read."""
        if self._largest is None:
            self._largest = self._run().largest_batch()

    def step(self, model: torch.nn.Module, inputs: Mapping[str, object], budget: Budget) -> Step:
        """See `step_around`; the budget's bytes are those of the first time."""
        found = step_around(model, inputs, budget, self._run(), self._target)
        self._bytes = found.bytes if self._bytes is None else self._bytes
        self._within.clear()
        self._resident = found.resident
        return replace(found, bytes=self._bytes, largest=self._largest, margin=self._margin)

    def costs(self, graph: AnalyzedGraph, device: torch.device, fused: bool) -> Costs:
        """See `costs_of`."""
        return costs_of(graph, device, fused, self._target)

    def resident(self, device: torch.device) -> int:
        """Bytes that the process holds without the optimizer's states: when a plan was solved for, else now."""
        if self._resident is None:
            return resident(device) if self._target is None else 0
        return self._resident

    def check(self, predictor: StepMemoryPredictor) -> str:
        """A line where the plan that was just compiled passes the budget all the same; empty where it does not.

        The solver knows a graph as PyTorch runs it, operator by operator, and each graph of a forward alone. What the
        plan takes beyond the budget is a margin for the next plan.

        Args:
            predictor: of that plan, right after its first forward.
        """
        names = {name: name.removeprefix("inputs_") for name in predictor.first}
        self._solved_for = larger_sizes(predictor.first, names, self._largest)
        run = self._run()
        peak = predictor.footprint(self._solved_for, run.optimizer, run.gradient_accumulation).peak
        if self._bytes is None or peak <= self._bytes:
            return ""
        excess = peak - self._bytes
        self._margin += excess
        return (
            f"what was compiled takes {gib_text(peak)}, {gib_text(excess)} over the budget, since a compiler orders "
            "operators by itself and graphs are planned one by one"
        )

    def excess(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> str:
        """A line about a batch whose step would pass the budget; empty where it does not.

        Args:
            predictor: of the plan in force.
            inputs: keyword arguments of the forward.
        """
        sizes = predictor.sizes_of(inputs)
        key = frozenset(sizes.items())
        is_solved = all(size <= self._solved_for.get(name, 0) for name, size in sizes.items())
        if self._bytes is None or is_solved or key in self._within:
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
