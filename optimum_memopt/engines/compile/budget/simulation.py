"""What the forward and backward hold under any set of saved nodes, without partitioning the joint graph. Pure.

The order is that of `passes.partition`: the forward in its own, and each recomputed operator in the backward just
before the first of the backward's own operators that needs it. `tests/engines/compile/budget/test_simulation.py`
compares it with `memory.timeline` byte by byte.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from optimum_memopt.engines.compile.budget.problem import Problem


@dataclass(frozen=True)
class Run:
    """A graph's run.

    Attributes:
        order: its operators.
        held: bytes while each of them runs.
        end: bytes after the last.
    """

    order: tuple[int, ...]
    held: tuple[int, ...]
    end: int

    @cached_property
    def peak(self) -> int:
        return max(self.held, default=self.end)


@dataclass(frozen=True)
class Simulation:
    """The forward and backward of a joint graph, in bytes over parameters and inputs.

    Attributes:
        saved: nodes that the forward saves for the backward.
        forward: its run.
        backward: its run.
        stashed: bytes held between the two.
        recomputed: operators of the forward that the backward runs again, in its order.
    """

    saved: frozenset[int]
    forward: Run
    backward: Run
    stashed: int
    recomputed: tuple[int, ...]

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.backward.peak)


def simulate(problem: Problem, saved: frozenset[int]) -> Simulation:
    """Run both graphs.

    Args:
        problem: the joint graph.
        saved: as `Problem.closure` has it, each of them read by the backward or by what is recomputed.
    """
    order = _raise_picks(problem, backward_order(problem, saved))
    read = {node for user in order for node in problem.reads[user] if node in problem.numbers}
    ends = [*problem.forward_outputs, *saved, *read]
    forward = _run(problem, _raise_picks(problem, sorted(problem.needed(ends))), ends, set(), 0)
    roots = {problem.roots[node] for node in saved}
    dropped = {problem.roots[node] for node in problem.forward_outputs} - roots
    stashed = forward.end - sum(problem.bytes[node] for node in dropped if problem.is_operator[node])
    given = sum(problem.bytes[node] for node in problem.tangents)
    owned = {node for node in roots if not problem.is_input[node]} | set(problem.tangents)
    backward = _run(problem, order, problem.backward_outputs, owned, stashed + given)
    recomputed = tuple(node for node in order if problem.is_forward[node])
    return Simulation(saved, forward, backward, stashed, recomputed)


def backward_order(problem: Problem, saved: Collection[int]) -> list[int]:
    """Operators of the backward graph, before picks of outputs are moved to their operators."""
    done = {*saved, *problem.numbers}
    order: list[int] = []
    for node in (*problem.backward_operators, *problem.backward_outputs):
        missing = problem.needed([node], done)
        done |= missing
        order.extend(sorted(missing))
    return order


def _raise_picks(problem: Problem, order: Sequence[int]) -> list[int]:
    """Each pick of an output directly behind its operator, where that is in the same graph."""
    present = set(order)
    picked: dict[int, list[int]] = {}
    for node in order:
        source = problem.picks[node]
        if source is not None and source in present:
            picked.setdefault(source, []).append(node)
    moved = {node for nodes in picked.values() for node in nodes}
    raised: list[int] = []

    def add(node: int) -> None:
        raised.append(node)
        for pick in picked.get(node, ()):
            add(pick)

    for node in order:
        if node not in moved:
            add(node)
    return raised


def _run(problem: Problem, order: Sequence[int], ends: Iterable[int], owned: set[int], start: int) -> Run:
    """Allocate and free as `memory.timeline.simulate` does.

    Args:
        problem: the joint graph.
        order: operators.
        ends: what the graph returns.
        owned: roots from outside that are freed after their last use.
        start: bytes held before the first operator.
    """
    reads, roots, sizes, workspaces = problem.reads, problem.roots, problem.bytes, problem.workspaces
    last: dict[int, int] = {}
    for step, node in enumerate(order):
        for read in reads[node]:
            last[roots[read]] = step
    for node in ends:
        last[roots[node]] = len(order)
    here = set(order)
    freed: list[list[int]] = [[] for _ in range(len(order) + 1)]
    for storage, step in last.items():
        if storage in here or storage in owned:
            freed[step].append(storage)
    held, during = start, []
    for step, node in enumerate(order):
        for storage in problem.allocates[node]:
            if storage in here:
                held += sizes[storage]
        during.append(held + workspaces[node])
        if roots[node] == node and node not in last and problem.is_operator[node]:
            held -= sizes[node]
        for storage in freed[step]:
            held -= sizes[storage]
    return Run(tuple(order), tuple(during), held)
