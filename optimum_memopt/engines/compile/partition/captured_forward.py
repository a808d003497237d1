"""A captured training forward, which can be queried for other plans, batch sizes and budgets, and its solver."""

import contextlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from optimum_memopt.engines.api.predictions import CurvePoint
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.composition import StepEvents, compose
from optimum_memopt.engines.compile.memory.events import GraphEvents
from optimum_memopt.engines.compile.memory.footprint import Footprint, StepContext
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.memory.tape import Tape, resized
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem, problem_of_tape
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.solver import offload
from optimum_memopt.engines.compile.solver.blocks import no_plans
from optimum_memopt.engines.compile.solver.offload import Host
from optimum_memopt.engines.compile.solver.segments import Link, segments_within
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver, points_of, solved

# Budgets for which one run of a tape is solved alone.
_PLANS_OF_RUN = 12
# Partitions of one graph that are compiled at most: with three, most budgets' plans are as good as with any number.
_MOST_VARIANTS = 3


@dataclass(frozen=True)
class ForwardSolver:
    """Solves all graphs of a forward for one batch.

    Attributes:
        host: where activations may be offloaded to; None: nowhere.
        segments: of every plan, as another rank has them; empty: those that each takes.
        gather_rate: see `StepContext`.
    """

    forward: TapeProblem
    host: Host | None = None
    segments: tuple[Link, ...] = ()
    gather_rate: float = 0.0

    @cached_property
    def solver(self) -> Solver:
        return Solver(self.forward.problem, cache(self._plans_of_run) if len(self.forward.runs) > 1 else no_plans)

    def _plans_of_run(self, run: int) -> tuple[frozenset[int], ...]:
        """Extra candidate plans for one layer's run, solved on its graph alone."""
        solver, numbers = Solver(self.forward.runs[run]), self.forward.numbers(run)
        low, high = solver.lowest.peak, solver.everything.peak
        # From the largest: limits that were found for larger budgets help most with the smallest.
        budgets = (low + (high - low) * part // _PLANS_OF_RUN for part in reversed(range(_PLANS_OF_RUN)))
        return tuple(frozenset(numbers[node] for node in plan.saved) for plan in solver.plans(budgets))

    @cached_property
    def lowest(self) -> int:
        """The lowest peak of recompute, bytes."""
        return self.solver.lowest.peak

    @cached_property
    def everything(self) -> int:
        """The peak with everything saved, bytes."""
        return self.solver.everything.peak

    def cheapest(self, allowed: int) -> Plan:
        """The fastest plan of those in which each graph has few partitions.

        Raises:
            Infeasible: no plan fits.
        """
        if self.segments:
            return self._in_segments(allowed)
        # Small changes to single runs of one graph would be so many graphs to compile.
        runs = self.forward.runs
        try:
            plan = offload.cheapest(self.solver, allowed, self.host, is_final=len(set(map(id, runs))) == len(runs))
        except Infeasible as infeasible:
            return self._in_segments(allowed, infeasible)
        if not plan.offloaded:
            return self._with_few_variants(plan, allowed)
        with contextlib.suppress(Infeasible):
            if allowed < self.lowest:
                return min(plan, self._in_segments(allowed), key=lambda plan: plan.extra_seconds)
        return plan

    def _in_segments(self, allowed: int, otherwise: Infeasible | None = None) -> Plan:
        """The fastest plan in segments of layers.

        Args:
            otherwise: without segments.

        Raises:
            Infeasible: none fits.
        """
        lowest, holds = (self.lowest, ()) if otherwise is None else (otherwise.peak, otherwise.holds)
        plans: list[Plan] = []
        for simulation in dict.fromkeys((self.solver.layers_recomputed, self.solver.lowest)):
            plan = self._with_few_variants(self.solver.plan(simulation), max(allowed, simulation.peak))
            saved = self.forward.of_runs(plan.saved)
            segments = segments_within(self.forward, saved, allowed, self.segments, self.gather_rate)
            if segments is not None and segments.peak <= allowed:
                extra = plan.extra_seconds + segments.seconds
                plans.append(replace(plan, peak=segments.peak, extra_seconds=extra, segments=segments.links))
            elif segments is not None:
                lowest = min(lowest, segments.peak)
        if not plans:
            raise Infeasible(lowest, holds)
        return min(plans, key=lambda plan: plan.extra_seconds)

    def _with_few_variants(self, plan: Plan, allowed: int) -> Plan:
        """A plan, or the one like it with `_MOST_VARIANTS` partitions of each graph, as far as one fits."""
        graphs = self.forward.graphs
        runs = list(self.forward.of_runs(plan.saved))
        for graph in dict.fromkeys(graphs):
            own = [run for run, of_run in enumerate(graphs) if of_run == graph]
            while len(ways := dict.fromkeys(runs[run] for run in own)) > _MOST_VARIANTS:
                merges = (
                    [new if run in own and saved == old else saved for run, saved in enumerate(runs)]
                    for old, new in itertools.permutations(ways, 2)
                )
                merged = ((self.saving(merge), merge) for merge in merges)
                fitting = [pair for pair in merged if pair[0].peak <= allowed]
                if not fitting:
                    break
                plan, runs = min(fitting, key=lambda pair: pair[0].extra_seconds)
        return plan

    def curve(self, outside: Footprint) -> tuple[CurvePoint, ...]:
        """Plans of budgets from the lowest peak to everything saved, in the step around them."""
        return points_of(solved(self.lowest, self.everything, self.cheapest), outside)

    def fits(self, allowed: int) -> bool:
        """True where `cheapest` finds a plan."""
        # Whatever fits will do, so that the cheapest is not searched for where something does.
        if min(self.everything, self.lowest) <= allowed:
            return True
        try:
            self.cheapest(allowed)
        except Infeasible:
            return False
        return True

    def saving(self, saved: Sequence[Collection[int]]) -> Plan:
        """The plan in which each run of the forward saves these nodes of its graph."""
        return self.solver.plan(simulate(self.forward.problem, self.forward.of_all(saved)))


@dataclass(frozen=True, eq=False)
class CapturedForward:
    """A training forward, which can be asked what it takes with any batch, and what fits.

    Attributes:
        graphs: in the order of their first runs.
        tape: their runs.
        untrained: names of parameters that require a gradient and get none.
    """

    graphs: tuple[CapturedGraph, ...]
    tape: Tape = field(default_factory=Tape.of_one)
    untrained: frozenset[str] = frozenset()

    @property
    def costs(self) -> str:
        """Where seconds are from."""
        return self.graphs[0].costs.source

    @property
    def chunks_loss(self) -> bool:
        return any(graph.chunks_loss for graph in self.graphs)

    @property
    def is_whole(self) -> bool:
        """True where nothing that is differentiated runs outside of its graphs."""
        return all(graph.partitioned is not None and graph.partitioned.is_all_of_forward for graph in self.graphs)

    @property
    def run_keys(self) -> tuple[tuple[str, str, int], ...]:
        """See `Tape.run_keys`."""
        return self.tape.run_keys([graph.digest for graph in self.graphs])

    def planned_by(self, index: int) -> "CapturedForward":
        """The forward under one of the choices that were noted; what passes between layers is recomputed or offloaded
        by the first of them alone."""
        graphs = tuple(replace(graph, plans=(graph.plans[index],)) for graph in self.graphs)
        return replace(self, graphs=graphs, tape=self.tape if index == 0 else self.tape.with_all_held())

    def rows_with(self, largest: LargestBatch | None) -> list[int]:
        """Sizes that are rows of the batch; `largest` as in `solver`."""
        return [size for graph in self.graphs for size in graph.rows_with(largest)]

    def sizes_for(self, times: int = 1, largest: LargestBatch | None = None) -> list[SymbolValues]:
        """The sizes of each graph; arguments as in `solver`."""
        return [graph.sizes_for(times, largest) for graph in self.graphs]

    def sizes_of(self, rows: int, tokens: int = 0) -> list[SymbolValues]:
        """The sizes of each graph for a batch of rows of n tokens; 0: as many as were captured."""
        return [graph.sizes_of(rows, tokens) for graph in self.graphs]

    def sizes_of_runs(self, sizes: Sequence[SymbolValues]) -> tuple[Tape, Sequence[SymbolValues]]:
        """The tape for a batch, and the sizes of each of its calls; `sizes` as in `problems`."""
        graphs = self.graphs
        named_sizes = (
            (name, of_graph[symbol])
            for graph, of_graph in zip(graphs, sizes, strict=True)
            for symbol, name in graph.names.items()
            if symbol in of_graph
        )
        tape = self.tape.at(dict(named_sizes))
        schedules = [graph.timeline for graph in graphs if graph.timeline is not None]
        if len(tape.calls) == 1 or len(schedules) < len(graphs):
            return tape, [sizes[call.graph] for call in tape.calls]
        named = [
            {symbol: size for symbol, size in of_graph.items() if symbol in graph.names}
            for graph, of_graph in zip(graphs, sizes, strict=True)
        ]
        return resized(tape, schedules, [graph.sizes for graph in graphs], named)

    def problems(self, sizes: Sequence[SymbolValues]) -> tuple[Tape, tuple[Problem, ...]]:
        """The tape for a batch, and the problem of each of its calls.

        Args:
            sizes: of each graph, of the symbols that are sizes of the batch; others follow from the graphs before it.
        """
        tape, of_runs = self.sizes_of_runs(sizes)
        problems: dict[object, Problem] = {}
        runs: list[Problem] = []
        for call, values in zip(tape.calls, of_runs, strict=True):
            key = call.graph, tuple(values.items())
            if key not in problems:
                problems[key] = self.graphs[call.graph].problem_at(values)
            runs.append(problems[key])
        return tape, tuple(runs)

    def problem(self, sizes: Sequence[SymbolValues] | None = None, frees_gradients: bool = False) -> TapeProblem:
        """Its graphs as one problem, for any plan.

        Args:
            sizes: see `problems`; None: of the batch that was captured.
            frees_gradients: see `compose`.
        """
        tape, runs = self.problems([graph.sizes for graph in self.graphs] if sizes is None else sizes)
        return problem_of_tape(tape.with_all_held(), runs, frees_gradients)

    def step_events(
        self, times: int = 1, largest: LargestBatch | None = None, frees_gradients: bool = False
    ) -> StepEvents:
        """The events of a step under the plans that were applied; arguments as in `solver` and `compose`."""
        tape, of_runs = self.sizes_of_runs(self.sizes_for(times, largest))
        events: dict[object, GraphEvents] = {}
        runs: list[GraphEvents] = []
        for call, values in zip(tape.calls, of_runs, strict=True):
            if (key := (call.graph, tuple(values.items()))) not in events:
                events[key] = self.graphs[call.graph].events_at(values)
            runs.append(events[key])
        return compose(tape, runs, frees_gradients)

    def solver(self, step: StepContext, times: int = 1, largest: LargestBatch | None = None) -> ForwardSolver:
        """The solver for its batch.

        Args:
            times: n: for an n-th of the batch's rows.
            largest: for the sizes of this batch where they are larger; None: for its own.
        """
        return self.solver_at(step, self.sizes_for(times, largest))

    def solver_at(self, step: StepContext, sizes: Sequence[SymbolValues]) -> ForwardSolver:
        """The solver for a batch of these sizes; see `problems`."""
        forward = self.problem(sizes, step.fixed.frees_gradients)
        return ForwardSolver(forward, self.host(forward, step), gather_rate=step.gather_rate)

    def solver_for_rows(self, step: StepContext, rows: int) -> ForwardSolver:
        """The solver for a batch of n rows, and the time that they take."""
        before = max((size for graph in self.graphs for size in graph.row_symbols.values()), default=rows)
        solver = self.solver_at(step, self.sizes_of(rows))
        problem = solver.forward.problem
        problem = replace(problem, seconds=tuple(seconds * rows / before for seconds in problem.seconds))
        return replace(solver, forward=replace(solver.forward, problem=problem))

    def host(self, forward: TapeProblem, step: StepContext) -> Host | None:
        """The host, as `forward`, its problem, may use it in a step; None where there is no link to one."""
        if not step.link:
            return None
        places = enumerate(forward.places)
        allowed = {node for node, (run, local) in places if local in self.graphs[forward.graphs[run]].offloadable}
        return Host(step.link, step.host, frozenset(allowed | forward.passed))
