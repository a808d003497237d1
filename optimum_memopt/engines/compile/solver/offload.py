"""Offload within a budget: how long copies take room on the device, and which activations are worth one. Pure.

Both directions are one problem: a reload is an offload with time running backwards.
"""

import bisect
import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.allocator import pinned_bytes
from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, seconds_of, simulate
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver


class Copy(NamedTuple):
    """A tensor on its way to the host, and on the device until the copy is complete.

    Attributes:
        after: the operator behind which it is begun.
        before: the one that waits for it at the latest; None: whoever comes behind the last.
    """

    after: int
    bytes: int
    before: int | None = None


class Overlap(NamedTuple):
    """When the device waits for each copy.

    Attributes:
        until: for each copy the index of the operator before which the device waits for it; the number of operators
            where it waits behind the last.
        stall: seconds that it waits in all.
    """

    until: tuple[int, ...]
    stall: float


def overlap(
    held: Sequence[int], seconds: Sequence[float], copies: Sequence[Copy], limit: int, bandwidth: float
) -> Overlap:
    """Let each copy take its time beside the operators behind it, one copy after the other.

    The device waits for a copy when it is complete, and earlier where the operator at hand would pass the limit, or is
    the last that may wait.

    Args:
        held: bytes while each operator runs, of a copied tensor up to the operator `Copy.after` only.
        copies: in the order in which they may begin.
        limit: bytes that copies under way must not take `held` beyond.
    """
    until = [len(held)] * len(copies)
    under_way: deque[tuple[float, int]] = deque()
    now = link_free = stall = 0.0
    in_flight = next_copy = 0
    for operator, size in enumerate(held):
        while under_way and (
            under_way[0][0] <= now
            or size + in_flight > limit
            or any(copies[number].before == operator for _, number in under_way)
        ):
            end, number = under_way.popleft()
            stall += max(0.0, end - now)
            now = max(now, end)
            in_flight -= copies[number].bytes
            until[number] = operator
        now += seconds[operator]
        while next_copy < len(copies) and copies[next_copy].after == operator:
            link_free = max(link_free, now) + copies[next_copy].bytes / bandwidth
            under_way.append((link_free, next_copy))
            in_flight += copies[next_copy].bytes
            next_copy += 1
    # Behind the last operator the device waits for all.
    stall += max(0.0, link_free - now) if under_way else 0.0
    return Overlap(tuple(until), stall)


# Bytes beyond the budget that are offloaded, as shares of what the link moves during the forward; of many more the
# device waits for the most part, which only pays where nothing else fits.
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
_MORE_SHARES = (4.0, 6.5)
# Below that a copy's launch takes as long as the copy.
_SMALLEST = 2**20
# What offload has to save of a step's time: it also takes memory of the host.
_WORTH = 0.01


@dataclass(frozen=True)
class Host:
    """The host, as a graph may use it.

    Attributes:
        bandwidth: of the link, bytes a second in one direction.
        available: bytes that copies may take there.
        allowed: roots that may be offloaded, and arguments of a tape's runs that only one run's backward may read.
    """

    bandwidth: float
    available: int
    allowed: frozenset[int]


def cheapest(solver: Solver, budget: int, host: Host | None, is_final: bool = True) -> Plan:
    """The fastest plan within a budget, with offload where that is faster and there is a host.

    Args:
        is_final: see `Solver.solve`.

    Raises:
        Infeasible: no plan fits.
    """
    try:
        recompute = solver.solve(budget, is_final)
    except Infeasible:
        if host is None or (offloading := with_offload(solver, None, budget, host)) is None:
            raise
        return offloading
    return (host and with_offload(solver, recompute, budget, host)) or recompute


def with_offload(solver: Solver, recompute: Plan | None, budget: int, host: Host) -> Plan | None:
    """The fastest plan with offload; None where it gains less than `_WORTH` over that of recompute alone (None: none
    fits), or fits no better."""
    worth = _WORTH * solver.seconds
    alone = float("inf") if recompute is None else recompute.extra_seconds
    if alone <= worth:
        return None
    best: Plan | None = None
    for plan in _plans_to_offload(solver, recompute, budget, host):
        offloading = _offloading(solver.problem, plan, budget, host)
        if best is not None and (offloading is None or offloading.extra_seconds > best.extra_seconds):
            # From here on the link is full.
            break
        best = offloading or best
    return best if best is not None and best.extra_seconds <= alone - worth else None


def _plans_to_offload(solver: Solver, recompute: Plan | None, budget: int, host: Host) -> Iterator[Plan]:
    """Plans that save more and more, for larger budgets; arguments as in `with_offload`."""
    if recompute is None:
        yield from map(solver.plan, dict.fromkeys((solver.lowest, solver.layers_recomputed)))
    larger = solver.lowest.peak if recompute is None else budget
    moved = host.bandwidth * seconds_of(solver.problem, solver.everything.forward.order)
    for share in _SHARES if recompute is not None else (*_SHARES, *_MORE_SHARES):
        relaxed = larger + int(share * moved)
        with contextlib.suppress(Infeasible):
            yield solver.solve(relaxed, is_final=False)
        if solver.everything.peak <= relaxed:
            return
    if recompute is None:
        yield solver.plan(solver.everything)


def _offloading(problem: Problem, plan: Plan, budget: int, host: Host) -> Plan | None:
    """The fewest bytes offloaded with which a plan for a larger budget is within this one; None where none are."""
    roots, sizes = problem.roots, problem.bytes
    sides = _sides(problem, simulate(problem, frozenset(plan.saved)))
    # A storage that two runs save would stay.
    times = Counter(roots[node] for node in plan.saved)
    candidates = [
        node
        for node in plan.saved
        if node in host.allowed and sizes[roots[node]] >= _SMALLEST and times[roots[node]] == 1
    ]
    candidates.sort(key=lambda node: (sides[0].last.get(roots[node], 0), node))

    def peak(count: int) -> int:
        """Bytes with the first candidates on the host, where no copy takes any time."""
        return max(max(side.held_without(candidates[:count])) for side in sides)

    if peak(len(candidates)) > budget:
        return None
    count = bisect.bisect_left(range(len(candidates)), True, key=lambda count: peak(count) <= budget)
    offloaded = tuple(candidates[:count])
    host_bytes = sum(pinned_bytes(sizes[roots[node]]) for node in offloaded)
    if not offloaded or host_bytes > host.available:
        return None
    stall = _stall(sides, offloaded, host.bandwidth)
    extra = plan.extra_seconds + stall
    return replace(
        plan, offloaded=offloaded, peak=peak(count), extra_seconds=extra, stall=stall, host_bytes=host_bytes
    )


def stall_of(problem: Problem, simulation: GraphSimulation, offloaded: Sequence[int], bandwidth: float) -> float:
    """Seconds that the device waits for copies of a plan, where they may take no memory beyond its peak without them.

    Args:
        offloaded: nodes that the simulation saves.
        bandwidth: of the link, bytes a second in one direction.
    """
    return _stall(_sides(problem, simulation), offloaded, bandwidth) if offloaded else 0.0


def _stall(sides: Sequence["_Side"], offloaded: Sequence[int], bandwidth: float) -> float:
    limit = max(max(side.held_without(offloaded)) for side in sides)
    return sum(side.stall(offloaded, limit, bandwidth) for side in sides)


def _sides(problem: Problem, simulation: GraphSimulation) -> tuple["_Side", "_Side"]:
    """With the backward's time running backwards, an activation is on the host behind its last use in either."""
    forward, backward = simulation.forward, simulation.backward
    of_backward = _Side(problem, backward.order[::-1], backward.held[::-1], is_reversed=True)
    return _Side(problem, forward.order, forward.held), of_backward


class _Side:
    """The forward's run, or the backward's with time running backwards; all saved activations are on the device.

    Args:
        is_reversed: the backward's: what runs of a tape are given is there from the beginning of a backward.
    """

    def __init__(
        self, problem: Problem, order: Sequence[int], held: Sequence[int], *, is_reversed: bool = False
    ) -> None:
        self._problem, self._order, self._held, self._is_reversed = problem, order, held, is_reversed
        # The index of the last operator that allocates or reads each storage, by its root; and of each run the last.
        self.last: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for index, node in enumerate(order):
            self.last.update({problem.roots[read]: index for read in (*problem.reads[node], node)})
            self._ends[problem.runs[node]] = index

    def copies(self, nodes: Sequence[int]) -> list[Copy]:
        """In the order in which they may begin."""
        roots, runs = self._problem.roots, self._problem.runs
        given = sorted({runs[node] for node in nodes if roots[node] != node})
        # An argument of a run is reloaded when the backward before it begins that is given such, too; or its own.
        reloading = dict(zip(given, (*given[1:], *given[-1:]), strict=True))
        copies = (self._copy(node, reloading) for node in nodes)
        return sorted(filter(None, copies), key=attrgetter("after", "bytes"))

    def _copy(self, node: int, reloading: Mapping[int, int]) -> Copy | None:
        """None for what is not read here. Copies of what a graph allocates are in that graph, others around it."""
        root, run = self._problem.roots[node], self._problem.runs[node]
        if (last := self.last.get(root)) is None:
            return None
        size = self._problem.bytes[root]
        if root == node:
            end = self._ends[run] + 1
            return Copy(last, size, end if end < len(self._order) else None)
        return Copy(self._ends.get(reloading[run], last) if self._is_reversed else last, size)

    def held_without(self, nodes: Sequence[int]) -> list[int]:
        """Bytes during each operator without these activations behind their last use."""
        gone = [0] * (len(self._held) + 1)
        for copy in self.copies(nodes):
            gone[copy.after + 1] += copy.bytes
        return [size - away for size, away in zip(self._held, accumulate(gone), strict=False)]

    def stall(self, nodes: Sequence[int], limit: int, bandwidth: float) -> float:
        seconds = [self._problem.seconds[node] for node in self._order]
        return overlap(self.held_without(nodes), seconds, self.copies(nodes), limit, bandwidth).stall
