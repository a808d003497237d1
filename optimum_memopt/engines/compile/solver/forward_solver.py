"""Solves for the plans of all graphs of a forward together, for one batch. Pure."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from optimum_memopt.engines.api.predictions import CurvePoint
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem
from optimum_memopt.engines.compile.solver import offload
from optimum_memopt.engines.compile.solver.blocks import no_plans
from optimum_memopt.engines.compile.solver.compression import Compression, with_compression
from optimum_memopt.engines.compile.solver.offload import Host
from optimum_memopt.engines.compile.solver.segments import Link, segments_within
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver, points_of, solved

# Number of budgets for which one run of a tape is solved alone.
_PLANS_OF_RUN = 12
# Maximum number of compiled partitions of one graph: with three, most budgets' plans are as good as with any number.
_MOST_VARIANTS = 3


@dataclass(frozen=True)
class ForwardSolver:
    """Solves all graphs of a forward for one batch.

    Attributes:
        host: the host to offload activations to; None: no offload.
        compression: inexact compression of activations; None: not allowed.
        segments: another rank's segments, which every plan must take; empty: each plan chooses its own.
        gather_rate: see `StepContext`.
    """

    forward: TapeProblem
    host: Host | None = None
    segments: tuple[Link, ...] = ()
    gather_rate: float = 0.0
    compression: Compression | None = None

    @cached_property
    def solver(self) -> Solver:
        return Solver(self.forward.problem, cache(self._plans_of_run) if len(self.forward.runs) > 1 else no_plans)

    def _plans_of_run(self, run: int) -> tuple[frozenset[int], ...]:
        """Returns extra candidate plans for one layer's run, solved on its graph alone."""
        solver, numbers = Solver(self.forward.runs[run]), self.forward.numbers(run)
        low, high = solver.lowest.peak, solver.everything.peak
        # Largest first: limits found for larger budgets help most with the smallest.
        budgets = (low + (high - low) * part // _PLANS_OF_RUN for part in reversed(range(_PLANS_OF_RUN)))
        return tuple(frozenset(numbers[node] for node in plan.saved) for plan in solver.plans(budgets))

    @cached_property
    def lowest(self) -> int:
        """Returns the lowest peak of recompute, in bytes."""
        return self.solver.lowest.peak

    @cached_property
    def everything(self) -> int:
        """Returns the peak with everything saved, in bytes."""
        return self.solver.everything.peak

    @cached_property
    def cheapest(self) -> Callable[[int], Plan]:
        """Returns a cached function from a number of bytes to the fastest plan within it, with few partitions of each
        graph.

        Raises:
            Infeasible: no plan fits.
        """
        # A curve is computed again with another margin, at the same budgets.
        return cache(self._solve)

    def _solve(self, allowed: int) -> Plan:
        if self.compression is None or self.segments:
            return self._cheapest_exact(allowed)
        try:
            exact = self._cheapest_exact(allowed)
        except Infeasible:
            if (plan := self.compressing(None, allowed)) is None:
                raise
            return plan
        return self.compressing(exact, allowed) or exact

    def compressing(self, exact: Plan | None, allowed: int) -> Plan | None:
        """Returns the plan with compression if it is worth it, else None; arguments as in `with_compression`."""
        if self.compression is None:
            return None
        return with_compression(self.solver, self.forward, self.compression, exact, allowed, self._with_few_variants)

    def _cheapest_exact(self, allowed: int) -> Plan:
        """Returns the fastest plan without compression, see `cheapest`."""
        if self.segments:
            return self._in_segments(allowed)
        # Small changes to single runs of one graph would add as many graphs to compile.
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
        """Returns the fastest plan in segments of layers.

        Args:
            otherwise: the error of solving without segments.

        Raises:
            Infeasible: no plan fits.
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
        """Returns the plan with at most `_MOST_VARIANTS` partitions of each graph, as far as merging them still
        fits."""
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
        """Returns the curve of a step with `outside`, from the lowest peak to everything saved."""
        return points_of(solved(self.lowest, self.everything, self.cheapest), outside)

    def fits(self, allowed: int) -> bool:
        """True if `cheapest` finds a plan."""
        # Any plan that fits is enough, so try the quick ones before searching for the cheapest.
        if min(self.everything, self.solver.layers_recomputed.peak) <= allowed or self.lowest <= allowed:
            return True
        try:
            self.cheapest(allowed)
        except Infeasible:
            return False
        return True

    def saving(self, saved: Sequence[Collection[int]]) -> Plan:
        """Returns the plan in which each run of the forward saves these nodes of its graph."""
        return self.solver.plan(simulate(self.forward.problem, self.forward.of_all(saved)))
