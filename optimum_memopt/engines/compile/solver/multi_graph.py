"""The graphs that graph breaks split a training forward into, solved as one. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from optimum_memopt.engines.compile.graph.problem import Problem, SiblingGraphs
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.solver import offload
from optimum_memopt.engines.compile.solver.offload import Host
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver

# What is left to later graphs, from their lowest peak to that of everything saved.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class MultiGraphSolver:
    """Solves graphs that run one after the other under one budget.

    Args:
        runs: how often each runs.
        reserve: bytes that each leaves beyond what those behind it take.
        hosts: where activations of each may wait, None: nowhere; empty: none may.
    """

    def __init__(
        self, problems: Sequence[Problem], runs: Sequence[int], reserve: int = 0, hosts: Sequence[Host | None] = ()
    ) -> None:
        self._problems, self._runs, self._reserve = problems, runs, reserve
        self._hosts = hosts or (None,) * len(problems)
        self._alone = [Solver(problem) for problem in problems]
        self._solver = lru_cache(None)(lambda index, siblings: self._alone[index].with_siblings(siblings))

    @cached_property
    def lowest(self) -> int:
        """The lowest peak of recompute, bytes."""
        return self._solvers[0].lowest.peak

    @cached_property
    def everything(self) -> int:
        """The peak with everything saved, bytes."""
        return self.saving([solver.everything.saved for solver in self._solvers]).peak

    @cached_property
    def layers_recomputed(self) -> Plan:
        """Every layer recomputed from its input, as level 1 has it."""
        return self.saving([solver.layers_recomputed.saved for solver in self._solvers])

    def siblings(self, share: float) -> tuple[SiblingGraphs, ...]:
        """The siblings of each graph where those behind it may take a share of what they can; see `_SHARES`."""
        given = [sum(problem.bytes[node] for node in problem.tangents) for problem in self._problems]
        around: list[SiblingGraphs] = []
        later, gradients = 0, 0
        for index in reversed(range(len(given))):
            siblings = SiblingGraphs(later, max(0, gradients), self._runs[index])
            around.insert(0, siblings)
            if index == 0:
                break
            solver = self._solver(index, siblings)
            low, high = solver.lowest, solver.everything
            later = low.peak + int(share * (high.peak - low.peak)) + self._reserve
            # What a backward is given is what the one behind it has returned, and is counted there.
            gradients += siblings.runs * (low.backward.end - given[index]) + given[index] - given[index - 1]
        return tuple(around)

    def fastest_share(self, allowed: int) -> float:
        """The share with which the plans of all graphs take least time; the lowest where none fits."""

        def extra_seconds(share: float) -> float:
            try:
                plans = self._solve(share, allowed, is_final=False)
            except Infeasible:
                return float("inf")
            return sum(runs * plan.extra_seconds for runs, plan in zip(self._runs, plans, strict=True))

        return min(_SHARES, key=extra_seconds)

    def cheapest(self, allowed: int) -> Plan:
        """The fastest plan.

        Raises:
            Infeasible: no plan fits.
        """
        share = self.fastest_share(allowed) if len(self._problems) > 1 else 0.0
        try:
            return self._combined(self._solve(share, allowed, is_final=True))
        except Infeasible:
            raise Infeasible(self.lowest) from None

    def fits(self, allowed: int) -> bool:
        """True where `cheapest` finds a plan."""
        if len(self._problems) == 1:
            return offload.fits(self._solvers[0], allowed, self._hosts[0])
        if self.lowest <= allowed or not any(self._hosts):
            return self.lowest <= allowed
        try:
            self.cheapest(allowed)
        except Infeasible:
            return False
        return True

    def saving(self, saved: Sequence[Collection[int]]) -> Plan:
        """The plan in which the forward of each graph saves these nodes."""
        pairs = zip(self._solvers, saved, strict=True)
        return self._combined([solver.plan(simulate(solver.problem, frozenset(nodes))) for solver, nodes in pairs])

    def _combined(self, plans: Sequence[Plan]) -> Plan:
        peak, left = 0, 0
        for siblings, problem, plan in zip(self._least, self._problems, plans, strict=True):
            alone = replace(problem, siblings=replace(siblings, later=0))
            peak = max(peak, left + (plan.peak if plan.offloaded else simulate(alone, frozenset(plan.saved)).peak))
            left += siblings.runs * _bytes_left(alone, plan)
        pairs = tuple(zip(self._runs, plans, strict=True))
        extra_seconds = sum(runs * plan.extra_seconds for runs, plan in pairs)
        seconds = sum(runs * plan.seconds for runs, plan in pairs)
        host_bytes = sum(runs * plan.host_bytes for runs, plan in pairs)
        return Plan((), peak, extra_seconds, seconds, host_bytes=host_bytes, graphs=tuple(plans))

    @cached_property
    def _least(self) -> tuple[SiblingGraphs, ...]:
        return self.siblings(0.0)

    @cached_property
    def _solvers(self) -> list[Solver]:
        """For each graph, where those behind it take as little as they can."""
        return [self._solver(index, siblings) for index, siblings in enumerate(self._least)]

    def _solve(self, share: float, allowed: int, is_final: bool) -> list[Plan]:
        plans: list[Plan] = []
        left = 0
        for index, (siblings, host) in enumerate(zip(self.siblings(share), self._hosts, strict=True)):
            solver, budget = self._solver(index, siblings), allowed - left
            plan = offload.cheapest(solver, budget, host) if is_final else solver.solve(budget, is_final=False)
            plans.append(plan)
            left += siblings.runs * _bytes_left(solver.problem, plan)
        return plans


def _bytes_left(problem: Problem, plan: Plan) -> int:
    """Bytes that a forward leaves on the device."""
    on_host = sum(problem.bytes[node] for node in plan.offloaded)
    return simulate(problem, frozenset(plan.saved)).forward.end - on_host
