"""How long copies between a device and the host take room on the device, beside what it computes. Pure.

Both directions are one problem: a reload is an offload with time running backwards.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import offloads
from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.allocator import pinned_bytes
from optimum_memopt.engines.compile.memory.simulation import simulate
from optimum_memopt.engines.compile.solver.solver import KEEPS_ALL, Floor, Solution, Solver


class Copy(NamedTuple):
    """A tensor on its way to the host.

    Attributes:
        after: index of the operator behind which the copy may begin.
        bytes: on the device until it is complete.
    """

    after: int
    bytes: int


@dataclass(frozen=True)
class Overlap:
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

    The device waits for a copy when it is complete, and earlier where the operator at hand would pass the limit.

    Args:
        held: bytes while each operator runs, of a copied tensor up to the operator `Copy.after` only.
        seconds: of each operator.
        copies: in the order in which they may begin.
        limit: bytes that copies under way must not take `held` beyond.
        bandwidth: bytes a second.
    """
    until = [len(held)] * len(copies)
    under_way: deque[tuple[float, int]] = deque()
    now = link_free = stall = 0.0
    in_flight = next_copy = 0
    for operator, size in enumerate(held):
        while under_way and (under_way[0][0] <= now or size + in_flight > limit):
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


# Bytes beyond the budget that are offloaded, as shares of what the link moves during the forward.
_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.5)
# Below that a copy's launch takes as long as the copy.
_SMALLEST = 2**20
# Of a step's time, what offload has to save: it also takes memory of the host.
_WORTH = 0.01


@dataclass(frozen=True)
class Host:
    """The host, as a graph may use it.

    Attributes:
        bandwidth: of the link, bytes a second in one direction.
        available: bytes that copies may take there.
        allowed: roots that may be offloaded.
    """

    bandwidth: float
    available: int
    allowed: frozenset[int]


@dataclass(frozen=True)
class Mixed:
    """A plan with both.

    Attributes:
        saved: nodes that the forward saves, on the device or the host, in order.
        offloaded: those of them that wait on the host.
        peak: bytes of the graph, exact as long as the device waits for no copy too late.
        extra_seconds: of what is recomputed, and of waiting for copies.
        stall: seconds of those that the device waits for copies.
        seconds: of the graph without.
        host_bytes: of pinned memory.
    """

    saved: tuple[int, ...]
    offloaded: tuple[int, ...]
    peak: int
    extra_seconds: float
    stall: float
    seconds: float
    host_bytes: int


def host_of(graph: AnalyzedGraph, link: float, available: int) -> Host | None:
    """The host, as a graph may use it; None where there is no link to one.

    Args:
        graph: whose activations.
        link: see `Host.bandwidth`; 0: none.
        available: see `Host`.
    """
    return Host(link, available, offloadable(graph)) if link else None


def offloadable(graph: AnalyzedGraph) -> frozenset[int]:
    """See `Host.allowed`."""
    return frozenset(graph.joint.order[candidate.activation.root] for candidate in offloads(graph.candidates))


def cheapest(solver: Solver, budget: int, host: Host | None) -> Solution | Mixed | Floor:
    """The fastest plan within a budget, with offload where that is faster.

    Args:
        solver: of a graph.
        budget: bytes that the graph's forward and backward may hold.
        host: where activations may wait; None: nowhere.
    """
    found = solver.solve(budget)
    return (with_offload(solver, found, budget, host) if host is not None else None) or found


def is_within(solver: Solver, budget: int, host: Host | None) -> bool:
    """Whether a plan is found within a budget; see `cheapest`."""
    # Whatever fits will do, so that the cheapest is not searched for where something does.
    if solver.everything.peak <= budget or solver.lowest.peak <= budget:
        return True
    return not isinstance(cheapest(solver, budget, host), Floor)


def with_offload(solver: Solver, found: Solution | Floor, budget: int, host: Host) -> Mixed | None:
    """The fastest plan with offload; None where it gains less than `_WORTH` over recompute alone, or fits no better.

    Args:
        solver: of a graph.
        found: its answer for this budget.
        budget: bytes that the graph's forward and backward may hold.
        host: where activations may wait.
    """
    problem, seconds = solver.problem, solver.seconds
    alone = found.extra_seconds if isinstance(found, Solution) else float("inf")
    lacking = found.peak - budget if isinstance(found, Floor) else 0
    moved = host.bandwidth * solver.everything.forward.seconds(problem)
    best: Mixed | None = None
    if alone <= _WORTH * seconds:
        return None
    for share in _SHARES:
        relaxed = solver.solve(budget + lacking + int(share * moved), is_final=False)
        if isinstance(relaxed, Floor):
            continue
        mixed = _offloading(problem, relaxed, budget, host)
        if best is not None and (mixed is None or mixed.extra_seconds > best.extra_seconds):
            # From here on the link is full.
            break
        best = mixed or best
        if relaxed.solver == KEEPS_ALL:
            break
    if best is None or best.extra_seconds > alone - _WORTH * seconds:
        return None
    return best


def _offloading(problem: Problem, relaxed: Solution, budget: int, host: Host) -> Mixed | None:
    """The fewest bytes offloaded with which a plan for a larger budget is within this one; None where none are."""
    found = simulate(problem, frozenset(relaxed.saved))
    sides = (
        _Side.of(problem, found.forward.order, found.forward.held),
        _Side.of(problem, found.backward.order[::-1], found.backward.held[::-1]),
    )
    last = sides[0].last
    candidates = [node for node in relaxed.saved if node in host.allowed and problem.bytes[node] >= _SMALLEST]
    candidates.sort(key=lambda node: (last.get(node, 0), node))

    def offloading(count: int) -> _Offloaded:
        return _Offloaded(problem, sides, tuple(candidates[:count]))

    low, high = 0, len(candidates)
    if offloading(high).peak > budget:
        return None
    while low < high:
        middle = (low + high) // 2
        if offloading(middle).peak <= budget:
            high = middle
        else:
            low = middle + 1
    offloaded = offloading(high)
    host_bytes = sum(pinned_bytes(problem.bytes[node]) for node in offloaded.nodes)
    if not offloaded.nodes or host_bytes > host.available:
        return None
    stall = offloaded.stall(host.bandwidth)
    return Mixed(
        saved=relaxed.saved,
        offloaded=offloaded.nodes,
        peak=offloaded.peak,
        extra_seconds=relaxed.extra_seconds + stall,
        stall=stall,
        seconds=relaxed.seconds,
        host_bytes=host_bytes,
    )


@dataclass(frozen=True)
class _Side:
    """The forward's run, or the backward's with time running backwards: an activation is on the host behind its last
    use in either.

    Attributes:
        order: operators.
        held: bytes while each of them runs, with all saved activations on the device.
        last: the index of the last operator that allocates or reads each storage, by its root.
    """

    order: tuple[int, ...]
    held: tuple[int, ...]
    last: Mapping[int, int]

    @classmethod
    def of(cls, problem: Problem, order: tuple[int, ...], held: tuple[int, ...]) -> "_Side":
        last: dict[int, int] = {}
        for index, node in enumerate(order):
            last.update({problem.roots[read]: index for read in (*problem.reads[node], node)})
        return cls(order, held, last)

    def without(self, copies: Sequence[Copy]) -> tuple[int, ...]:
        """Bytes during each operator without the copied tensors behind their last use."""
        gone = [0] * (len(self.held) + 1)
        for copy in copies:
            gone[copy.after + 1] += copy.bytes
        return tuple(size - away for size, away in zip(self.held, accumulate(gone), strict=False))


@dataclass(frozen=True)
class _Offloaded:
    """A plan some of whose saved activations wait on the host.

    Attributes:
        problem: the joint graph.
        sides: forward and backward.
        nodes: those activations.
    """

    problem: Problem
    sides: tuple[_Side, _Side]
    nodes: tuple[int, ...]

    @cached_property
    def copies(self) -> tuple[tuple[Copy, ...], ...]:
        """Offloads and reloads, on their sides."""
        size = self.problem.bytes
        return tuple(
            tuple(sorted(Copy(side.last[node], size[node]) for node in self.nodes if node in side.last))
            for side in self.sides
        )

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Bytes during the operators of both sides."""
        return tuple(side.without(copies) for side, copies in zip(self.sides, self.copies, strict=True))

    @property
    def peak(self) -> int:
        """Bytes, where no copy takes any time."""
        return max(map(max, self.held))

    def stall(self, bandwidth: float) -> float:
        """Seconds that the device waits for copies."""
        seconds = self.problem.seconds
        return sum(
            overlap(held, [seconds[node] for node in side.order], copies, self.peak, bandwidth).stall
            for side, held, copies in zip(self.sides, self.held, self.copies, strict=True)
        )
