"""The graphs that graph breaks split a training forward into, solved together. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from optimum_memopt.engines.compile.budget.mixed import Host, Mixed, cheapest
from optimum_memopt.engines.compile.budget.mixed import is_within as is_within_alone
from optimum_memopt.engines.compile.budget.problem import OtherGraphs, Problem
from optimum_memopt.engines.compile.budget.simulation import simulate
from optimum_memopt.engines.compile.budget.solve import Floor, Solution, Solver

# What is left to later graphs, from their lowest peak to that of everything saved.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Plans:
    """Of all graphs.

    Attributes:
        peak: bytes.
        extra_seconds: of what is recomputed.
        seconds: of all graphs without.
    """

    peak: int
    extra_seconds: float
    seconds: float


class Together:
    """What graphs that run one after the other may leave to each other.

    Args:
        problems: the graphs, in order.
        runs: how often each runs.
        reserve: bytes that each leaves beyond what those behind it take.
        host: where activations of a single graph may wait; None: nowhere. Several are solved with recompute alone.
    """

    def __init__(
        self, problems: Sequence[Problem], runs: Sequence[int], reserve: int = 0, host: Host | None = None
    ) -> None:
        self._problems, self._runs, self._reserve = problems, runs, reserve
        self._host = host if len(problems) == 1 else None
        self._solver = lru_cache(None)(self._new_solver)

    @cached_property
    def lowest(self) -> int:
        """The lowest peak of recompute, bytes."""
        return self._first.lowest.peak

    @cached_property
    def everything(self) -> int:
        """The peak with everything saved, bytes."""
        return self.saving([self._solver(*graph).everything.saved for graph in enumerate(self._most)]).peak

    def others(self, share: float) -> tuple[OtherGraphs, ...]:
        """What a forward holds around each graph if those behind it may take so much; see `_SHARES`."""
        given = [sum(problem.bytes[node] for node in problem.tangents) for problem in self._problems]
        found: list[OtherGraphs] = []
        later, gradients = 0, 0
        for index in reversed(range(len(given))):
            others = OtherGraphs(later, max(0, gradients), self._runs[index])
            found.insert(0, others)
            solver = self._solver(index, others)
            low, high = solver.lowest, solver.everything
            later = low.peak + int(share * (high.peak - low.peak)) + self._reserve
            # What a backward is given is what the one behind it has returned, and is counted there.
            own = low.backward.end - given[index]
            gradients += others.runs * own + given[index] - (given[index - 1] if index else 0)
        return tuple(found)

    def fastest_share(self, allowed: int) -> float:
        """The share with which the plans of all graphs take least time; the lowest where none fits.

        Args:
            allowed: bytes that all of them may hold.
        """

        def extra_seconds(share: float) -> float:
            found = self._solved(self.others(share), allowed)
            return float("inf") if found is None else self.saving(found).extra_seconds

        return min(_SHARES, key=extra_seconds)

    def cheapest(self, allowed: int) -> Solution | Mixed | Plans | Floor:
        """The fastest plans.

        Args:
            allowed: bytes that all graphs may hold.
        """
        if len(self._problems) == 1:
            return cheapest(self._first, allowed, self._host)
        found = self._solved(self.others(self.fastest_share(allowed)), allowed, is_final=True)
        return Floor(self.lowest, ()) if found is None else self.saving(found)

    def is_within(self, allowed: int) -> bool:
        """Whether plans are found; `allowed` as in `cheapest`."""
        if len(self._problems) == 1:
            return is_within_alone(self._first, allowed, self._host)
        return self.lowest <= allowed

    def saving(self, saved: Sequence[Collection[int]]) -> Plans:
        """What plans take.

        Args:
            saved: nodes that the forward of each graph saves.
        """
        peak, left, extra_seconds, seconds = 0, 0, 0.0, 0.0
        for index, (others, nodes) in enumerate(zip(self._least, saved, strict=True)):
            solver = self._solver(index, replace(others, later=0))
            found = simulate(solver.problem, frozenset(nodes))
            peak = max(peak, left + found.peak)
            left += others.runs * found.forward.end
            extra_seconds += others.runs * solver.extra_seconds(found)
            seconds += others.runs * solver.seconds
        return Plans(peak, extra_seconds, seconds)

    @cached_property
    def _least(self) -> tuple[OtherGraphs, ...]:
        return self.others(0.0)

    @cached_property
    def _most(self) -> tuple[OtherGraphs, ...]:
        return self.others(1.0)

    @property
    def _first(self) -> Solver:
        """Of the first graph, where those behind it take as little as they can."""
        return self._solver(0, self._least[0])

    def _solved(
        self, others: Sequence[OtherGraphs], allowed: int, is_final: bool = False
    ) -> list[tuple[int, ...]] | None:
        """The nodes that each graph saves; None where one does not fit."""
        plans, left = [], 0
        for index, around in enumerate(others):
            solver = self._solver(index, around)
            found = solver.solve(allowed - left, is_final)
            if isinstance(found, Floor):
                return None
            plans.append(found.saved)
            left += around.runs * simulate(solver.problem, frozenset(found.saved)).forward.end
        return plans

    def _new_solver(self, index: int, others: OtherGraphs) -> Solver:
        return Solver(replace(self._problems[index], others=others))
