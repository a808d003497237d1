"""The cheapest set of nodes to save with which the exact peak of a graph is within a budget. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from optimum_memopt.engines.compile.graph.problem import ALONE, Problem, SiblingGraphs
from optimum_memopt.engines.compile.memory.simulation import (
    Simulation,
    held_at_peak,
    simulate,
    simulate_everything_saved,
)
from optimum_memopt.engines.compile.solver.blocks import LayerFrontiers
from optimum_memopt.engines.compile.solver.dynamic_program import DynamicProgram, dynamic_programs
from optimum_memopt.engines.compile.solver.plan import Infeasible, Plan
from optimum_memopt.engines.compile.solver.whole_graph import SMALL, improve, lowest_of_whole_graph, solve_whole_graph


@dataclass(frozen=True)
class Solver:
    """Solves one joint graph for any number of budgets.

    Attributes:
        problem: the graph.
        shared_frontiers: those that a solver of the same graph with other siblings has made.
    """

    problem: Problem
    shared_frontiers: LayerFrontiers | None = None

    def with_siblings(self, siblings: SiblingGraphs) -> "Solver":
        """A solver of the same graph with these around it, which shares most of the work."""
        return Solver(replace(self.problem, siblings=siblings), self._frontiers)

    @cached_property
    def everything(self) -> Simulation:
        """All activations saved."""
        return simulate_everything_saved(self.problem)

    @cached_property
    def layers_recomputed(self) -> Simulation:
        """Every layer recomputed from its input, as level 1 has it."""
        problem = self.problem
        outside = {node for node in problem.activations if not problem.layers[node] or problem.is_statistic[node]}
        return simulate(problem, problem.closure((outside | problem.boundaries) - problem.constants))

    @cached_property
    def lowest(self) -> Simulation:
        """The plan with the lowest peak that is found; no budget below it is met."""
        of_blocks = (program.lowest() for program in reversed(self._programs))
        lowest = min(*of_blocks, self.layers_recomputed, key=lambda simulation: simulation.peak)
        return lowest_of_whole_graph(self.problem, lowest)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the forward and backward with all activations saved."""
        return self.everything.forward.seconds(self.problem) + self.everything.backward.seconds(self.problem)

    def plan(self, simulation: Simulation) -> Plan:
        """The plan that saves what a simulation does."""
        extra = simulation.extra_seconds(self.problem) - self.everything.extra_seconds(self.problem)
        return Plan(tuple(sorted(simulation.saved)), simulation.peak, extra, self.seconds)

    def prepare(self) -> None:
        """Solve what is the same for every budget."""
        _ = self._programs

    def solve(self, budget: int, is_final: bool = True) -> Plan:
        """The plan with the least time for recompute of all whose peak fits; of equal ones that with the lowest peak.

        Args:
            budget: bytes that the graph's forward and backward may hold.
            is_final: False: without the last small changes, and in a large graph without the search over all of it
                where something fits already; each takes as long as the rest.

        Raises:
            Infeasible: no plan fits.
        """
        if self.everything.peak <= budget:
            return self.plan(self.everything)
        fitting = [candidate for candidate in self._candidates(budget, is_final) if candidate.peak <= budget]
        if not fitting:
            raise Infeasible(self.lowest.peak, _holders(self.problem, self.lowest))
        best = min(fitting, key=lambda candidate: (candidate.extra_seconds(self.problem), candidate.peak))
        return self.plan(improve(self.problem, best, budget) if is_final else best)

    def _candidates(self, budget: int, is_final: bool) -> Iterator[Simulation]:
        with_borders, without_borders = self._programs
        best = without_borders.solve(budget)
        if best is None and budget < self.lowest.peak:
            return
        if best is None or best.backward.peak > best.forward.peak:
            # What many blocks recompute before the backward of any of them is not in the measure of one block's plan.
            fallback = with_borders.solve(budget)
            if fallback is not None:
                yield fallback
        yield self.lowest if best is None else best
        yield self.layers_recomputed
        # It takes longer, and wins in small graphs and where the dynamic program finds nothing.
        is_small = sum(self.problem.is_forward) < SMALL
        if is_small or (best is None and is_final):
            whole = solve_whole_graph(self.problem, budget, best or self.everything)
            if whole is not None:
                yield whole

    @cached_property
    def _frontiers(self) -> LayerFrontiers:
        return self.shared_frontiers or LayerFrontiers(self.problem)

    @cached_property
    def _programs(self) -> tuple[DynamicProgram, DynamicProgram]:
        return dynamic_programs(self.problem, self._frontiers)


def _holders(problem: Problem, simulation: Simulation, most: int = 4) -> tuple[tuple[str, int], ...]:
    """The largest groups of what is held at the peak: gradients, other graphs, else by where it is computed."""
    gradients = {problem.roots[node] for node in problem.backward_outputs}
    held = held_at_peak(problem, simulation, simulation.backward.peak > simulation.forward.peak)
    groups: dict[str, int] = {}
    if problem.siblings != ALONE:
        groups["other graphs of the forward"] = max(0, simulation.peak - sum(held.values()))
    for node, size in held.items():
        where = "gradients of parameters" if node in gradients else _place(problem, node)
        groups[where] = groups.get(where, 0) + size
    return tuple(sorted(groups.items(), key=lambda item: -item[1])[:most])


def _place(problem: Problem, node: int) -> str:
    if problem.layers[node]:
        return f"layer {problem.layers[node]}"
    source = problem.picks[node]
    # `aten.embedding.default`
    operator = problem.kinds[node if source is None else source].split(".")
    return f"{operator[min(1, len(operator) - 1)]} outside of layers"
