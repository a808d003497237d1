"""Recompute and offload together: what a budget costs where saved activations may wait on the host. Pure.

What recompute alone costs falls steeply with the budget, and the link to the host moves so many bytes a step for
nothing. So a larger budget is solved with recompute alone, and what is over is offloaded, from the first layers on:
their copies have the rest of the forward to end in, and the rest of the backward to come back in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from optimum_memopt.engines.compile.analysis.candidates import offloads
from optimum_memopt.engines.compile.analysis.graph import AnalyzedGraph
from optimum_memopt.engines.compile.budget.problem import Problem
from optimum_memopt.engines.compile.budget.simulation import Run, Simulation, simulate
from optimum_memopt.engines.compile.budget.solve import KEEPS_ALL, Floor, Solution, Solver
from optimum_memopt.engines.compile.memory.overlap import Copy, overlap

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
        seconds: of the graph without.
        host_bytes: of pinned memory.
    """

    saved: tuple[int, ...]
    offloaded: tuple[int, ...]
    peak: int
    extra_seconds: float
    seconds: float
    host_bytes: int


def pinned_bytes(size: int) -> int:
    """What torch's allocator of pinned memory takes for a tensor: the next power of two
    (`aten/src/ATen/core/CachingHostAllocator.h`, 2.13)."""
    return 1 << (size - 1).bit_length()


def host_of(graph: AnalyzedGraph, link: float, available: int) -> Host | None:
    """The host, as a graph may use it; None where there is no link to one.

    Args:
        graph: whose activations.
        link: see `Host.bandwidth`; 0: none.
        available: see `Host`.
    """
    number = {node: index for index, node in enumerate(graph.joint.nodes)}
    allowed = frozenset(number[candidate.activation.root] for candidate in offloads(graph.candidates))
    return Host(link, available, allowed) if link else None


def cheapest(solver: Solver, budget: int, host: Host | None) -> Solution | Mixed | Floor:
    """The fastest plan within a budget, with offload where that is faster.

    Args:
        solver: of a graph.
        budget: bytes that the graph's forward and backward may hold.
        host: where activations may wait; None: nowhere.
    """
    found = solver.solve(budget)
    return (with_offload(solver, found, budget, host) if host is not None else None) or found


def with_offload(solver: Solver, found: Solution | Floor, budget: int, host: Host) -> Mixed | None:
    """The fastest plan with offload; None where it gains less than `_WORTH` over recompute alone, or fits no better.

    Args:
        solver: of a graph.
        found: its answer for this budget.
        budget: bytes that the graph's forward and backward may hold.
        host: where activations may wait.
    """
    everything, problem = solver.everything, solver.problem
    seconds = _seconds(problem, everything.forward) + _seconds(problem, everything.backward)
    alone = found.extra_seconds if isinstance(found, Solution) else float("inf")
    lacking = found.peak - budget if isinstance(found, Floor) else 0
    moved = host.bandwidth * _seconds(problem, everything.forward)
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
    last = _last_uses(problem, found.forward)
    candidates = [node for node in relaxed.saved if node in host.allowed and problem.bytes[node] >= _SMALLEST]
    candidates.sort(key=lambda node: (last.get(node, 0), node))
    low, high = 0, len(candidates)
    if _Offloaded.of(problem, found, candidates).peak > budget:
        return None
    while low < high:
        middle = (low + high) // 2
        if _Offloaded.of(problem, found, candidates[:middle]).peak <= budget:
            high = middle
        else:
            low = middle + 1
    offloaded = _Offloaded.of(problem, found, candidates[:high])
    host_bytes = sum(pinned_bytes(problem.bytes[node]) for node in offloaded.nodes)
    if not offloaded.nodes or host_bytes > host.available:
        return None
    return Mixed(
        saved=relaxed.saved,
        offloaded=offloaded.nodes,
        peak=offloaded.peak,
        extra_seconds=relaxed.extra_seconds + offloaded.stall(problem, host.bandwidth),
        seconds=relaxed.seconds,
        host_bytes=host_bytes,
    )


@dataclass(frozen=True)
class _Offloaded:
    """A plan some of whose saved activations wait on the host.

    Attributes:
        nodes: those.
        forward: bytes during its operators, of each of them up to its last use.
        backward: bytes during its operators, the last one first; of each of them up to its last use in that order.
        forward_copies: of the offloads.
        backward_copies: of the reloads, in that order.
        orders: operators of both.
    """

    nodes: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_copies: tuple[Copy, ...]
    backward_copies: tuple[Copy, ...]
    orders: tuple[tuple[int, ...], tuple[int, ...]]

    @classmethod
    def of(cls, problem: Problem, found: Simulation, nodes: Sequence[int]) -> "_Offloaded":
        """With these nodes, in the order of their last use in the forward."""
        backward = Run(found.backward.order[::-1], found.backward.held[::-1], 0)
        forward_copies, backward_copies = (
            tuple(sorted(Copy(last[node], problem.bytes[node]) for node in nodes if node in last))
            for last in (_last_uses(problem, run) for run in (found.forward, backward))
        )
        return cls(
            tuple(nodes),
            _without(found.forward.held, forward_copies),
            _without(backward.held, backward_copies),
            forward_copies,
            backward_copies,
            (found.forward.order, backward.order),
        )

    @property
    def peak(self) -> int:
        """Bytes, where no copy takes any time."""
        return max(*self.forward, *self.backward)

    def stall(self, problem: Problem, bandwidth: float) -> float:
        """Seconds that the device waits for copies."""
        runs = zip(
            self.orders, (self.forward, self.backward), (self.forward_copies, self.backward_copies), strict=True
        )
        return sum(
            overlap(held, [problem.seconds[node] for node in order], copies, self.peak, bandwidth).stall
            for order, held, copies in runs
        )


def _last_uses(problem: Problem, run: Run) -> dict[int, int]:
    """The index of the last operator of a run that allocates or reads each storage, by its root."""
    found: dict[int, int] = {}
    for index, node in enumerate(run.order):
        found.update({problem.roots[read]: index for read in (*problem.reads[node], node)})
    return found


def _without(held: Sequence[int], copies: Sequence[Copy]) -> tuple[int, ...]:
    """Bytes during each operator without the copied tensors behind their last use."""
    gone = [0] * (len(held) + 1)
    for copy in copies:
        gone[copy.after + 1] += copy.bytes
    without, away = [], 0
    for index, size in enumerate(held):
        away += gone[index]
        without.append(size - away)
    return tuple(without)


def _seconds(problem: Problem, run: Run) -> float:
    return sum(problem.seconds[node] for node in run.order)
