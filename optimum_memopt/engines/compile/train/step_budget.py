"""Holds a budget for every batch of a run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from optimum_memopt.engines.api.engine import Run
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.costs.cache import costs_of
from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.symbols import larger_sizes
from optimum_memopt.engines.compile.memory.tape import Tape, bytes_left_by
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.siblings import SeveralGraphs
from optimum_memopt.engines.compile.train.step_context import Step, step_around
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.memory.optimizers import Optimizer
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
        graphs: of a forward.
    """

    def __init__(self, run: Callable[[], Run], target: Device | None = None) -> None:
        self._run = run
        self._target = target
        # None until it was asked for: what is available shrinks while training runs.
        self._bytes: int | None = None
        self.largest: LargestBatch | None = None
        self._margin = 0
        self._resident: int | None = None
        # What the process held before the run's first plan was made, and when this one was.
        self._first_constant: int | None = None
        self._constant: int | None = None
        self._peaks: dict[tuple[StepMemoryPredictor, frozenset[tuple[str, int]]], int] = {}
        self.solved_for: Mapping[str, int] = {}
        self.graphs = SeveralGraphs()
        # Graphs of the current forward that have run, and what all of them may hold.
        self._earlier: tuple[PartitionedGraph, ...] = ()
        self._allowed = 0

    def for_another(self, largest: LargestBatch | None) -> "StepBudget":
        """The same bytes for another plan.

        Args:
            largest: batch that the plan is made for; None: that of the run.
        """
        other = StepBudget(self._run, self._target)
        other.largest, other._bytes, other._margin = largest, self._bytes, self._margin
        other._first_constant = self._first_constant
        return other

    def read_largest(self) -> None:
        """Read the run's largest batch; not while a model is traced, where no tensor can be read."""
        if self.largest is None:
            self.largest = self._run().largest_batch()

    def step(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, object],
        budget: Budget,
        earlier: Sequence[PartitionedGraph] = (),
        tape: Tape | None = None,
        untrained: Collection[str] = (),
    ) -> Step:
        """See `step_around`; the budget's bytes are those of the first time.

        Args:
            model: see `step_around`.
            inputs: see `step_around`.
            budget: see `step_around`.
            earlier: graphs of the same forward that have run.
            tape: their runs.
            untrained: see `step_around`.
        """
        self._earlier = tuple(earlier)
        first = self._constant if earlier else self._first_constant
        left, left_by_largest = (_bytes_left_by(earlier, tape, batch) for batch in (None, self.largest))
        around = step_around(model, inputs, budget, self._run(), self._target, left, untrained)
        found = _without_second_room(around, first)
        found = replace(found, outside=replace(found.outside, other_forwards=left_by_largest))
        self._bytes = found.bytes if self._bytes is None else self._bytes
        self._allowed = replace(found.outside, other_forwards=0).activations_within(self._bytes - self._margin)
        self._peaks.clear()
        self._resident, self._constant = found.resident, found.outside.constant
        if self._first_constant is None:
            self._first_constant = self._constant
        return replace(found, bytes=self._bytes, largest=self.largest, margin=self._margin)

    def costs(self, graph: AnalyzedGraph, device: torch.device, fused: bool) -> Costs:
        """See `costs_of`; measuring stays within the budget."""
        return costs_of(graph, device, fused, self._target, self._bytes)

    def resident(self, device: torch.device) -> int:
        """Bytes that the process holds without the optimizer's states: when a plan was solved for, else now."""
        if self._resident is None:
            return held_bytes(device) if self._target is None else self._target.libraries
        return self._resident

    def make_room(self, error: DoesNotFitError) -> str:
        """Plan what the graphs of the forward leave to each other, and say so; empty where that is not the reason.

        Args:
            error: of the graph that was planned last.
        """
        runs = _runs(self._earlier)
        if not (runs or self.graphs.reserved) or not self.graphs.learn(runs, self._allowed, error.lacking):
            return ""
        later = "graph 2" if self.graphs.count == 2 else f"graphs 2 to {self.graphs.count}"
        reserved = gib_text(self.graphs.reserved)
        return (
            f"graph {len(runs) + 1} of the training forward takes {gib_text(error.lacking)} more than other graphs "
            f"leave of the budget: compiling again with {reserved} reserved for {later}"
        )

    def check(self, predictor: StepMemoryPredictor) -> str:
        """A line where the plan that was just compiled passes the budget all the same; empty where it does not.

        Args:
            predictor: of that plan, right after its first forward.
        """
        self.solved_for = larger_sizes(predictor.first, {name: name for name in predictor.first}, self.largest)
        peak = self._peak(predictor, self.solved_for)
        if self._bytes is None or peak <= self._bytes:
            return ""
        return (
            f"what was compiled takes {gib_text(peak)}, {gib_text(peak - self._bytes)} over the budget, since a "
            "compiler orders operators by itself, graphs are planned one by one, and CUDA's allocator gives tensors "
            "larger blocks"
        )

    def tighten(self, predictor: StepMemoryPredictor) -> str:
        """Plan for what the last plan took beyond the budget, and say how, in a few words.

        The solver knows a graph as PyTorch runs it, operator by operator, and the others of a forward as soon as they
        were compiled once.

        Args:
            predictor: see `check`.
        """
        if self.graphs.learn(predictor.runs, self._allowed):
            return "for all graphs of the forward together"
        self._margin += self._peak(predictor, self.solved_for) - (self._bytes or 0)
        return "with that much less"

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
        key = predictor, frozenset(sizes.items())
        if key not in self._peaks:
            run = self._run()
            self._peaks[key] = bounded_bytes(predictor, sizes, run.optimizer, run.gradient_accumulation)
        return self._peaks[key]


def bounded_bytes(
    predictor: StepMemoryPredictor,
    sizes: Mapping[str, int] | None = None,
    optimizer: Optimizer | None = None,
    gradient_accumulation: bool | None = None,
    *,
    batch_size: int | None = None,
) -> int:
    """What a budget bounds: a step's peak, on CUDA that of the allocator's blocks; arguments as in `footprint`."""
    step = sizes, optimizer, gradient_accumulation
    blocks = predictor.allocator_peak(*step, batch_size=batch_size)
    peak = predictor.footprint(*step, batch_size=batch_size).peak
    return max(peak, blocks.allocated if blocks is not None else 0)


def _without_second_room(step: Step, first: int | None) -> Step:
    """Later readings find the process grown into the room that was left for it at first.

    Measuring operators and solving leave 4 to 14 MiB behind, which the first steps would take otherwise. With room
    once more on top of that, no step of a RoBERTa of 4 layers of 256 took the last 26 MiB of 732; now it is 9.

    Args:
        step: now.
        first: `constant` before the first plan was made; None: this is the first time.
    """
    grown = step.outside.constant - first if first is not None else 0
    if first is None or not 0 < grown <= step.room:
        return step
    return replace(step, outside=replace(step.outside, constant=first), resident=step.resident - grown)


def _bytes_left_by(graphs: Sequence[PartitionedGraph], tape: Tape | None, largest: LargestBatch | None) -> int:
    """What the runs of graphs have left, with the first batch or the largest; 0 where that is not known."""
    schedules = [graph.timeline for graph in graphs if graph.timeline is not None]
    if tape is None or len(schedules) < len(graphs):
        return 0
    sizes = [larger_sizes(graph.sizes, graph.names, largest) for graph in graphs]
    events = [schedule.at(values) for schedule, values in zip(schedules, sizes, strict=True)]
    return bytes_left_by(tape, [events[call.graph] for call in tape.calls])


def _runs(graphs: Sequence[PartitionedGraph]) -> tuple[int, ...]:
    return tuple(graph.runs for graph in graphs)
