"""The graphs of a training forward as they run, as one problem for any batch, and the solver for it."""

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.graph.symbols import SymbolValues
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.memory.step_context import StepContext
from optimum_memopt.engines.compile.memory.tape import Tape, resized
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem, problem_of_tape
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.solver import offload
from optimum_memopt.engines.compile.solver.offload import Host
from optimum_memopt.engines.compile.solver.solver import Plan, Solver


@dataclass(frozen=True)
class ForwardSolver:
    """Solves all graphs of a forward for one batch.

    Attributes:
        host: where activations may be offloaded to; None: nowhere.
    """

    forward: TapeProblem
    host: Host | None = None

    @cached_property
    def solver(self) -> Solver:
        return Solver(self.forward.problem)

    @cached_property
    def lowest(self) -> int:
        """The lowest peak of recompute, bytes."""
        return self.solver.lowest.peak

    @cached_property
    def everything(self) -> int:
        """The peak with everything saved, bytes."""
        return self.solver.everything.peak

    def cheapest(self, allowed: int) -> Plan:
        """The fastest plan.

        Raises:
            Infeasible: no plan fits.
        """
        # Small changes to single runs would be so many graphs to compile.
        return offload.cheapest(self.solver, allowed, self.host, is_final=len(self.forward.runs) == 1)

    def fits(self, allowed: int) -> bool:
        """True where `cheapest` finds a plan."""
        return offload.fits(self.solver, allowed, self.host)

    def saving(self, saved: Sequence[Collection[int]]) -> Plan:
        """The plan in which each run of the forward saves these nodes of its graph."""
        return self.solver.plan(simulate(self.forward.problem, self.forward.of_all(saved)))


# Partitions of one graph that are compiled at most: with three, most budgets' plans are as good as with any number.
_MOST_VARIANTS = 3


def saved_by_run(
    solver: ForwardSolver, plan: Plan, allowed: int, graphs: Sequence[int], keys: Sequence[Hashable]
) -> tuple[frozenset[int], ...]:
    """What each run of a forward saves under a plan, or under one that is like it and needs fewer graphs.

    Args:
        graphs: of each run.
        keys: runs of one key save the same.
    """
    forward = solver.forward
    runs = list(forward.of_runs(plan.saved))
    if plan.offloaded:
        return tuple(runs)

    def with_set(of: Collection[int], saved: frozenset[int]) -> list[frozenset[int]]:
        return [saved if run in of else before for run, before in enumerate(runs)]

    def cost(saved: Sequence[frozenset[int]]) -> float:
        changed = solver.saving(saved)
        return changed.extra_seconds if changed.peak <= allowed else math.inf

    lowest = forward.of_runs(solver.solver.lowest.saved)
    for key in dict.fromkeys(keys):
        same = [run for run, other in enumerate(keys) if other == key]
        if len({runs[run] for run in same}) > 1:
            sets = dict.fromkeys((*(runs[run] for run in same), *(lowest[run] for run in same)))
            runs = min((with_set(same, saved) for saved in sets), key=cost)
    for graph in dict.fromkeys(graphs):
        while True:
            ways = {
                way: [r for r, of in enumerate(graphs) if of == graph and runs[r] == way]
                for way in (runs[r] for r, of in enumerate(graphs) if of == graph)
            }
            if len(ways) <= _MOST_VARIANTS:
                break
            merged = min((with_set(ways[one], other) for one in ways for other in ways if one != other), key=cost)
            if cost(merged) == math.inf:
                break
            runs = merged
    return tuple(runs)


def sizes_of_runs(
    graphs: Sequence[CapturedGraph], sizes: Sequence[SymbolValues]
) -> tuple[Tape, Sequence[SymbolValues]]:
    """The tape for a batch, and the sizes of each of its calls; `sizes` as in `problem_of`."""
    tape = graphs[0].tape
    partitioned = [graph.partitioned for graph in graphs if graph.partitioned is not None]
    schedules = [graph.timeline for graph in partitioned if graph.timeline is not None]
    if len(tape.calls) == 1 or len(schedules) < len(graphs):
        return tape, [sizes[call.graph] for call in tape.calls]
    named = [
        {symbol: size for symbol, size in of_graph.items() if symbol in graph.names}
        for graph, of_graph in zip(graphs, sizes, strict=True)
    ]
    return resized(tape, schedules, [graph.sizes for graph in graphs], named)


def problem_of(graphs: Sequence[CapturedGraph], sizes: Sequence[SymbolValues]) -> TapeProblem:
    """The graphs of a forward as one problem.

    Args:
        sizes: of each graph, of the symbols that are sizes of the batch; others follow from the graphs before it.
    """
    tape, of_runs = sizes_of_runs(graphs, sizes)
    problems: dict[object, Problem] = {}
    runs: list[Problem] = []
    for call, values in zip(tape.calls, of_runs, strict=True):
        key = call.graph, tuple(values.items())
        if key not in problems:
            problems[key] = graphs[call.graph].problem_at(values)
        runs.append(problems[key])
    return problem_of_tape(tape, runs)


def forward_solver(
    graphs: Sequence[CapturedGraph], step: StepContext, times: int = 1, largest: LargestBatch | None = None
) -> ForwardSolver:
    """The solver for a forward's batch.

    Args:
        times: n: for an n-th of the batch's rows.
        largest: for the sizes of this batch where they are larger; None: for its own.
    """
    return solver_at(graphs, step, [graph.sizes_for(times, largest) for graph in graphs])


def solver_at(graphs: Sequence[CapturedGraph], step: StepContext, sizes: Sequence[SymbolValues]) -> ForwardSolver:
    """The solver for a batch of these sizes; see `problem_of`."""
    forward = problem_of(graphs, sizes)
    return ForwardSolver(forward, host_of(graphs, forward, step))


def solver_for_rows(graphs: Sequence[CapturedGraph], step: StepContext, rows: int) -> ForwardSolver:
    """The solver for a batch of n rows, and the time that they take."""
    before = max((size for graph in graphs for size in graph.row_symbols.values()), default=rows)
    solver = solver_at(graphs, step, [{**g.sizes, **dict.fromkeys(g.row_symbols, rows)} for g in graphs])
    seconds = tuple(seconds * rows / before for seconds in solver.forward.problem.seconds)
    return replace(solver, forward=replace(solver.forward, problem=replace(solver.forward.problem, seconds=seconds)))


def host_of(graphs: Sequence[CapturedGraph], forward: TapeProblem, step: StepContext) -> Host | None:
    """The host, as a forward may use it in a step; None where there is no link to one."""
    if not step.link:
        return None
    graph_of = [call.graph for call in graphs[0].tape.calls]
    allowed = (node for node, (run, local) in enumerate(forward.places) if local in graphs[graph_of[run]].offloadable)
    return Host(step.link, step.host, frozenset(allowed))
