"""Plans offload within a budget: how long copies keep memory on the device, and which activations are worth a copy.
Pure.

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
from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, seconds_of, simulate
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver
from optimum_memopt.engines.simulator.allocator import pinned_bytes


class Copy(NamedTuple):
    """A tensor's copy to the host; the tensor stays on the device until the copy is complete.

    Attributes:
        after: index of the operator after which the copy begins.
        before: index of the operator before which the device waits for it at the latest; None: after the last one.
    """

    after: int
    bytes: int
    before: int | None = None


class Overlap(NamedTuple):
    """When the device waits for each copy.

    Attributes:
        until: for each copy the index of the operator before which the device waits for it; the number of operators
            if it waits after the last one.
        stall: total seconds that the device waits.
    """

    until: tuple[int, ...]
    stall: float


def overlap(
    held: Sequence[int], seconds: Sequence[float], copies: Sequence[Copy], limit: int, bandwidth: float
) -> Overlap:
    """Overlap the copies, one after the other, with the operators that follow them.

    A copied tensor is freed once its copy is complete. The device waits for an incomplete copy if the next operator
    would exceed the limit, or is the last that may wait for it.

    Args:
        held: bytes while each operator runs; a copied tensor counts up to the operator `Copy.after` only.
        copies: copies in the order in which they may begin.
        limit: bytes that `held` and the copies under way must not exceed together.
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
    # After the last operator the device waits for all copies.
    stall += max(0.0, link_free - now) if under_way else 0.0
    return Overlap(tuple(until), stall)


# Bytes beyond the budget to offload, as shares of what the link moves during the forward. `_MORE_SHARES` mostly stall
# the device, and only pay if nothing else fits.
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
_MORE_SHARES = (4.0, 6.5)
# Smallest storage to offload, in bytes: below it, launching a copy takes as long as the copy.
_SMALLEST = 2**20
# Share of a step's time that offload must save: it also takes host memory.
_WORTH = 0.01


@dataclass(frozen=True)
class Host:
    """The host resources that offload may use.

    Attributes:
        bandwidth: of the link, bytes per second in one direction.
        available: bytes of host memory that copies may take.
        allowed: roots that may be offloaded, and arguments of a tape's runs that only one run's backward may read.
    """

    bandwidth: float
    available: int
    allowed: frozenset[int]


def cheapest(solver: Solver, budget: int, host: Host | None, is_final: bool = True) -> Plan:
    """Returns the fastest plan within a budget, with offload if that is faster and there is a host.

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
    """Returns the fastest plan with offload; None if none fits, or it gains less than `_WORTH` over `recompute`.

    Args:
        recompute: the plan of recompute alone; None: none fits.
    """
    worth = _WORTH * solver.seconds
    alone = float("inf") if recompute is None else recompute.extra_seconds
    if alone <= worth:
        return None
    best: Plan | None = None
    for plan in _plans_to_offload(solver, recompute, budget, host):
        offloading = _offloading(solver.problem, plan, budget, host)
        if best is not None and (offloading is None or offloading.extra_seconds > best.extra_seconds):
            # The link is saturated: offloading more gets slower.
            break
        best = offloading or best
    return best if best is not None and best.extra_seconds <= alone - worth else None


def _plans_to_offload(solver: Solver, recompute: Plan | None, budget: int, host: Host) -> Iterator[Plan]:
    """Yields plans that save more and more, for larger budgets; arguments as in `with_offload`."""
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
    """Returns the plan for a larger budget with the least offload that brings it within this one; None if no offload
    does."""
    roots, sizes = problem.roots, problem.bytes
    sides = _sides(problem, simulate(problem, frozenset(plan.saved)))
    # A storage that two runs save would stay on the device.
    times = Counter(roots[node] for node in plan.saved)
    candidates = [
        node
        for node in plan.saved
        if node in host.allowed and sizes[roots[node]] >= _SMALLEST and times[roots[node]] == 1
    ]
    candidates.sort(key=lambda node: (sides[0].last.get(roots[node], 0), node))

    def peak(count: int) -> int:
        """Returns the peak in bytes with the first `count` candidates on the host, if copies took no time."""
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
    """Returns the seconds that the device waits for a plan's copies, if copies under way must not raise its peak.

    Args:
        offloaded: nodes to offload; the simulation saves them.
        bandwidth: of the link, bytes per second in one direction.
    """
    return _stall(_sides(problem, simulation), offloaded, bandwidth) if offloaded else 0.0


def _stall(sides: Sequence["_Side"], offloaded: Sequence[int], bandwidth: float) -> float:
    limit = max(max(side.held_without(offloaded)) for side in sides)
    return sum(side.stall(offloaded, limit, bandwidth) for side in sides)


def _sides(problem: Problem, simulation: GraphSimulation) -> tuple["_Side", "_Side"]:
    """Returns the forward, and the backward in reverse: in both, an activation is on the host after its last use."""
    forward, backward = simulation.forward, simulation.backward
    of_backward = _Side(problem, backward.order[::-1], backward.held[::-1], is_reversed=True)
    return _Side(problem, forward.order, forward.held), of_backward


class _Side:
    """The forward, or the backward with time running backwards; all saved activations are on the device.

    Args:
        is_reversed: this is the backward, in which the arguments of a tape's runs exist from the start of a run's
            backward.
    """

    def __init__(
        self, problem: Problem, order: Sequence[int], held: Sequence[int], *, is_reversed: bool = False
    ) -> None:
        self._problem, self._order, self._held, self._is_reversed = problem, order, held, is_reversed
        # Index of the last operator that allocates or reads each storage, by root; and of each run's last operator.
        self.last: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for index, node in enumerate(order):
            self.last.update({problem.roots[read]: index for read in (*problem.reads[node], node)})
            self._ends[problem.runs[node]] = index

    def copies(self, nodes: Sequence[int]) -> list[Copy]:
        """Returns the copies of these nodes in the order in which they may begin."""
        roots, runs = self._problem.roots, self._problem.runs
        given = sorted({runs[node] for node in nodes if roots[node] != node})
        # A run's argument is reloaded at the start of the preceding backward with such arguments, else of its own.
        reloading = dict(zip(given, (*given[1:], *given[-1:]), strict=True))
        copies = (self._copy(node, reloading) for node in nodes)
        return sorted(filter(None, copies), key=attrgetter("after", "bytes"))

    def _copy(self, node: int, reloading: Mapping[int, int]) -> Copy | None:
        """Returns a node's copy; None if this side does not use it. A graph copies the storages that it allocates
        itself; others are copied around it."""
        root, run = self._problem.roots[node], self._problem.runs[node]
        if (last := self.last.get(root)) is None:
            return None
        size = self._problem.bytes[root]
        if root == node:
            end = self._ends[run] + 1
            return Copy(last, size, end if end < len(self._order) else None)
        return Copy(self._ends.get(reloading[run], last) if self._is_reversed else last, size)

    def held_without(self, nodes: Sequence[int]) -> list[int]:
        """Returns the bytes during each operator without these activations after their last use."""
        gone = [0] * (len(self._held) + 1)
        for copy in self.copies(nodes):
            gone[copy.after + 1] += copy.bytes
        return [size - away for size, away in zip(self._held, accumulate(gone), strict=False)]

    def stall(self, nodes: Sequence[int], limit: int, bandwidth: float) -> float:
        seconds = [self._problem.seconds[node] for node in self._order]
        return overlap(self.held_without(nodes), seconds, self.copies(nodes), limit, bandwidth).stall
