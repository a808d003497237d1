"""Plans the graphs of a training forward: what is chosen for each in its step, until what was made of it fits."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from optimum_memopt.engines.api.run import LargestBatch, Run
from optimum_memopt.engines.compile.capture.traced_forward import GraphInForward
from optimum_memopt.engines.compile.costs.cache import costs_of
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import ALONE, SiblingGraphs
from optimum_memopt.engines.compile.graph.symbols import larger_sizes
from optimum_memopt.engines.compile.memory.step_context import StepContext, step_around
from optimum_memopt.engines.compile.memory.tape import bytes_left_by
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph, captured_graph
from optimum_memopt.engines.compile.partition.choice import Choice
from optimum_memopt.engines.compile.partition.producers.producer import Producer, Solvable
from optimum_memopt.engines.compile.predict.step_predictor import StepMemoryPredictor
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.engines.compile.solver.solver import Solver
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.logs import best_effort, get_logger
from optimum_memopt.memory.optimizers import Optimizer
from optimum_memopt.plans.plan_file import GraphSignature
from optimum_memopt.sizes import gib_text

# Of one batch's plan, until what was compiled is within the budget too.
_MOST_COMPILES = 3
# Of each of those, in which no further graph of the forward was reached, until all of them fit.
_MOST_RESERVES = 3


class GraphReservations:
    """The graphs of one forward, as far as compiling it has shown them. Pure.

    torch compiles and runs each before it traces the next one. So the first plan of a graph is made as if no other one
    followed. Where that leaves a later graph too little, the forward is compiled again, and each graph leaves to those
    behind it what they take at least, or more where all together are faster then.
    """

    def __init__(self) -> None:
        self._planned: list[CapturedGraph] = []
        # As of the last call of `learn`.
        self._learned: tuple[CapturedGraph, ...] = ()
        self._siblings: tuple[SiblingGraphs, ...] = ()
        self._share = 0.0
        self._reserve = 0

    @property
    def count(self) -> int:
        return len(self._planned)

    @property
    def reserved(self) -> int:
        """Bytes that the first one leaves to those behind it."""
        return self._siblings[0].later if self._siblings else 0

    def note(self, index: int, graph: CapturedGraph) -> None:
        """Note a planned graph by its place in the forward; its number of runs is not known yet."""
        if index < len(self._planned) and self._planned[index].signature == graph.signature:
            self._planned[index] = replace(graph, runs=self._planned[index].runs)
        else:
            # Other graphs may follow this one.
            self._planned[index:] = [graph]

    def siblings(self, index: int, signature: GraphSignature, times: int = 1) -> SiblingGraphs:
        """The other graphs of the forward around one, as was learned.

        Args:
            signature: of the graph; torch may compile one of several graphs again, alone.
            times: n: the batch is an n-th of the rows, and later graphs take as little as they can.
        """
        if index >= len(self._learned) or self._learned[index].signature != signature:
            return ALONE
        return self._siblings[index] if times == 1 else self._solver(times).siblings(0)[index]

    def learn(self, runs: Sequence[int], allowed: int, lacking: int = 0) -> bool:
        """Take in a forward whose plans did not fit together.

        Args:
            runs: how often each of its graphs ran, as far as it came.
            allowed: bytes that all of them may hold.
            lacking: bytes. If all that this forward shows was known, the process has grown: later graphs are left no
                more than they take at least, then that much more.

        Returns:
            True where the next plans are made for something else.
        """
        for index, count in enumerate(runs):
            self._planned[index] = replace(self._planned[index], runs=count)
        before = tuple(self.siblings(index, graph.signature) for index, graph in enumerate(self._planned))
        is_new = [(graph.signature, graph.runs) for graph in self._learned] != [
            (graph.signature, graph.runs) for graph in self._planned
        ]
        if runs and not is_new and not self._share:
            self._reserve += lacking
        self._learned = tuple(self._planned)
        solver = self._solver()
        if is_new:
            self._share = solver.fastest_share(allowed)
        elif lacking:
            self._share = 0.0
        self._siblings = solver.siblings(self._share)
        return self._siblings != before

    def _solver(self, times: int = 1) -> MultiGraphSolver:
        problems, runs = zip(*((graph.problem(times), graph.runs) for graph in self._learned), strict=True)
        return MultiGraphSolver(problems, runs, self._reserve)


@dataclass(frozen=True)
class PlannerSpec:
    """The subject of a planner.

    Attributes:
        fused: a compiler fuses what is bound by memory.
        target: the device that steps are planned for; None: where the model lies.
    """

    producer: Producer
    run: Callable[[], Run]
    fused: bool = False
    target: Device | None = None
    with_curve: bool = False
    with_lengths: bool = False


class Planned(Protocol):
    """The result of planning a forward."""

    @property
    def predictor(self) -> StepMemoryPredictor | None:
        """Predicts its steps; None where nothing is predicted."""


_P = TypeVar("_P", bound=Planned)


class Planner(Generic[_P]):
    """Plans one model's steps for every batch up to the largest; under a budget until the step is within it.

    Attributes:
        solved_for: sizes that the plan in force was solved for, by the plan table's names.
    """

    def __init__(self, model: torch.nn.Module, spec: PlannerSpec) -> None:
        self._model, self._spec = model, spec
        # None until it was asked for: what is available shrinks while training runs.
        self._limit: int | None = None
        self.largest: LargestBatch | None = None
        self._margin = 0
        self._resident: int | None = None
        # What the process held before the run's first plan was made, and when this one was.
        self._first_constant: int | None = None
        self._constant: int | None = None
        self._peaks: dict[tuple[StepMemoryPredictor, frozenset[tuple[str, int]]], int] = {}
        self.solved_for: Mapping[str, int] = {}
        self._graphs = GraphReservations()
        # Of the current forward how often each graph has run, and what all of them may hold.
        self._earlier: tuple[int, ...] = ()
        self._allowed = 0

    def for_another(self, largest: LargestBatch | None, spec: PlannerSpec) -> "Planner[_P]":
        """A planner within the same bytes."""
        planner: Planner[_P] = Planner(self._model, spec)
        planner.largest, planner._limit, planner._margin = largest, self._limit, self._margin
        planner._first_constant = self._first_constant
        return planner

    @property
    def producer(self) -> Producer:
        return self._spec.producer

    @property
    def solves(self) -> bool:
        """True where the plan has to be within a budget."""
        return self._spec.producer.bound is not None

    def plan(self, attempt: Callable[[], _P], forget: Callable[[], None]) -> _P:
        """Plan until the step is within the budget.

        Args:
            attempt: traces the forward, whose graphs ask `choose`.

        Raises:
            DoesNotFitError: no plan fits.
        """
        if not self.solves:
            return attempt()
        if self.largest is None:
            # Not while a model is traced, where no tensor can be read.
            self.largest = self._spec.run().largest_batch()
        number = 1
        while True:
            planned = self._with_room(attempt, forget)
            line = ""
            if (predictor := planned.predictor) is not None:
                with best_effort("the predicted peak"):
                    line = self._check(predictor)
            if not line or predictor is None:
                return planned
            if number == _MOST_COMPILES:
                get_logger().warning(f"NOT within the budget: {line}")
                return planned
            get_logger().info(f"{line}: solving again {self._tighten(predictor)}")
            # It holds what the forward has saved.
            del planned, predictor
            forget()
            number += 1

    def choose(self, graph: AnalyzedGraph, state: GraphInForward) -> Choice:
        """The choice for a graph that is being partitioned.

        Raises:
            DoesNotFitError: nothing fits the budget.
        """
        solvable = self._solvable(graph, state) if self.solves else None
        return self.producer.choose(graph, state.choices, solvable)

    def resident(self, held: int) -> int:
        """Bytes that the process holds without the optimizer's states: when a plan was solved for, else `held`."""
        if self._resident is None:
            return held if self._spec.target is None else self._spec.target.libraries
        return self._resident

    def is_within(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> bool:
        """True where a batch's step is within the budget."""
        return self._limit is None or self._peak(predictor, predictor.sizes_of(inputs)) <= self._limit

    def excess(self, predictor: StepMemoryPredictor, inputs: Mapping[str, object]) -> str:
        """A line about a batch whose step would pass the budget; empty where it does not; arguments as above."""
        sizes = predictor.sizes_of(inputs)
        is_solved = all(size <= self.solved_for.get(name, 0) for name, size in sizes.items())
        if self._limit is None or is_solved or (peak := self._peak(predictor, sizes)) <= self._limit:
            return ""
        shown = ", ".join(f"{name}={size}" for name, size in sorted(sizes.items()))
        return (
            f"a batch with {shown} would take {gib_text(peak)}, over the budget of {gib_text(self._limit)}: solving "
            "again for it"
        )

    def _solvable(self, graph: AnalyzedGraph, state: GraphInForward) -> Solvable:
        index, device = len(state.earlier), next(self._model.parameters()).device
        state.progress.stage = "measuring operators, and solving for the cheapest recompute"
        step = self.step(state)
        larger = replace(graph, size_hints=larger_sizes(graph.size_hints, graph.names, step.largest))
        costs = costs_of(larger, device, self._spec.fused, self._spec.target, self._limit)
        captured = captured_graph(larger, costs)
        siblings_at = partial(self._graphs.siblings, index, graph.signature)
        self._graphs.note(index, replace(captured, analyzed=None))
        solver = Solver(captured.problem()).with_siblings(siblings_at())
        if solver.everything.peak > step.fixed.activations_within(step.limit):
            solver.prepare()
        growth = math.prod(larger.size_hints[symbol] / size for symbol, size in graph.size_hints.items())
        # Again after measuring and solving, which leave something behind in the process.
        around = self.step(state)
        return Solvable(
            captured,
            solver,
            siblings_at,
            replace(around, fixed=replace(around.fixed, batch=math.ceil(around.fixed.batch * growth))),
            self._spec.with_curve and not index,
            self._spec.with_lengths and not index,
        )

    def step(self, state: GraphInForward) -> StepContext:
        """The step around the graph that is being partitioned; the limit is that of the first time."""
        self._earlier = state.tape.runs
        first = self._constant if state.earlier else self._first_constant
        left, left_by_largest = (_bytes_left(state, batch) for batch in (None, self.largest))
        spec, budget = self._spec, self._spec.producer.bound
        assert budget is not None
        around = step_around(self._model, state.inputs, budget, spec.run(), spec.target, left, state.untrained)
        step = _without_second_room(around, first)
        step = replace(step, fixed=replace(step.fixed, other_forwards=left_by_largest))
        self._limit = step.limit if self._limit is None else self._limit
        self._allowed = replace(step.fixed, other_forwards=0).activations_within(self._limit - self._margin)
        self._peaks.clear()
        self._resident, self._constant = step.resident, step.fixed.constant
        if self._first_constant is None:
            self._first_constant = self._constant
        return replace(step, limit=self._limit, largest=self.largest, margin=self._margin)

    def _with_room(self, attempt: Callable[[], _P], forget: Callable[[], None]) -> _P:
        count, tries = 0, 0
        while True:
            try:
                return attempt()
            except DoesNotFitError as error:
                # A try that was the first to reach a graph could not have left it room.
                tries += self._graphs.count == count
                count = self._graphs.count
                line = "" if tries > _MOST_RESERVES else self._make_room(error)
                if not line:
                    raise
            get_logger().info(line)
            forget()
            # The error's frames hold what the graphs that ran have saved.
            gc.collect()

    def _make_room(self, error: DoesNotFitError) -> str:
        """Plan what the graphs of the forward leave to each other, and say so; empty where that is not the reason."""
        runs = self._earlier
        if not (runs or self._graphs.reserved) or not self._graphs.learn(runs, self._allowed, error.lacking):
            return ""
        later = "graph 2" if self._graphs.count == 2 else f"graphs 2 to {self._graphs.count}"
        reserved = gib_text(self._graphs.reserved)
        return (
            f"graph {len(runs) + 1} of the training forward takes {gib_text(error.lacking)} more than other graphs "
            f"leave of the budget: compiling again with {reserved} reserved for {later}"
        )

    def _check(self, predictor: StepMemoryPredictor) -> str:
        """A line where what was made of the plan passes the budget all the same; empty where it does not."""
        self.solved_for = larger_sizes(predictor.first, {name: name for name in predictor.first}, self.largest)
        peak = self._peak(predictor, self.solved_for)
        if self._limit is None or peak <= self._limit:
            return ""
        return (
            f"what was compiled takes {gib_text(peak)}, {gib_text(peak - self._limit)} over the budget, since a "
            "compiler orders operators by itself, graphs are planned one by one, and CUDA's allocator gives tensors "
            "larger blocks"
        )

    def _tighten(self, predictor: StepMemoryPredictor) -> str:
        """Plan for what the last plan took beyond the budget, and say how, in a few words.

        The solver knows a graph as PyTorch runs it, operator by operator, and the others of a forward as soon as they
        were compiled once.
        """
        if self._graphs.learn(predictor.tape.runs, self._allowed):
            return "for all graphs of the forward together"
        self._margin += self._peak(predictor, self.solved_for) - (self._limit or 0)
        return "with a margin of that size"

    def _peak(self, predictor: StepMemoryPredictor, sizes: Mapping[str, int]) -> int:
        key = predictor, frozenset(sizes.items())
        if key not in self._peaks:
            run = self._spec.run()
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
    """Bytes that a budget bounds: a step's peak, on CUDA of the allocator's blocks; arguments as in `footprint`."""
    step = sizes, optimizer, gradient_accumulation
    blocks = predictor.allocator_peak(*step, batch_size=batch_size)
    peak = predictor.footprint(*step, batch_size=batch_size).peak
    return max(peak, blocks.allocated if blocks is not None else 0)


def _without_second_room(step: StepContext, first: int | None) -> StepContext:
    """Later readings find the process grown into the room that was left for it at first.

    Measuring operators and solving leave 4 to 14 MiB behind, which the first steps would take otherwise. With room
    once more on top of that, no step of a RoBERTa of 4 layers of 256 took the last 26 MiB of 732; now it is 9.

    Args:
        first: `constant` before the first plan was made; None: this is the first time.
    """
    grown = step.fixed.constant - first if first is not None else 0
    if first is None or not 0 < grown <= step.room:
        return step
    return replace(step, fixed=replace(step.fixed, constant=first), resident=step.resident - grown)


def _bytes_left(state: GraphInForward, largest: LargestBatch | None) -> int:
    """Bytes that the earlier graphs have left, with the first batch or the largest; 0 where that is not known."""
    schedules = [graph.timeline for graph in state.earlier if graph.timeline is not None]
    if len(schedules) < len(state.earlier):
        return 0
    sizes = [larger_sizes(graph.sizes, graph.names, largest) for graph in state.earlier]
    events = [schedule.at(values) for schedule, values in zip(schedules, sizes, strict=True)]
    return bytes_left_by(state.tape, [events[call.graph] for call in state.tape.calls])
