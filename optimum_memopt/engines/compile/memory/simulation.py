"""Simulates the memory of forward and backward for any set of saved nodes, without partitioning the joint graph. Pure.

Operators run in the order of the partitioned graphs: the forward in its own order, and each recomputed operator just
before the first of the backward's own operators that needs it. `tests/graph/test_simulation.py` compares the result
with `events.schedule` byte by byte.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimum_memopt.engines.api.predictions import GRADIENTS, RECOMPUTED, SAVED, TEMPORARY
from optimum_memopt.engines.compile.graph.problem import Conversion, Problem, Tables
from optimum_memopt.engines.compile.memory.graph_events import BACKWARD, GraphEvents, Prediction, RunMemory
from optimum_memopt.engines.simulator.events import Event, Storage


@dataclass(frozen=True)
class GraphSimulation(Prediction[int]):
    """The memory of a joint graph under a set of saved nodes.

    Attributes:
        saved: nodes that the forward saves for the backward.
        recomputed: operators of the forward that the backward reruns, in the backward's order.
        converting: operators that compress activations in the forward and restore them in the backward.
    """

    saved: frozenset[int]
    recomputed: tuple[int, ...]
    converting: tuple[int, ...] = ()

    def seconds(self, problem: Problem) -> float:
        """Returns the seconds of all operators."""
        return seconds_of(problem, self.forward.order) + seconds_of(problem, self.backward.order)

    def extra_seconds(self, problem: Problem) -> float:
        """Returns the seconds of recomputed operators and conversions."""
        return seconds_of(problem, (*self.recomputed, *self.converting))


def seconds_of(problem: Problem, operators: Iterable[int]) -> float:
    return math.fsum(problem.seconds[node] for node in operators)


def simulate(problem: Problem, saved: frozenset[int], compressed: Collection[int] = ()) -> GraphSimulation:
    """Simulate both graphs.

    Args:
        saved: a result of `Problem.closure`: each node is read by the backward or by a recomputed operator.
        compressed: activations in `saved` to compress; each has an entry in `Problem.conversions`.
    """
    first, ends, order = _orders(problem, saved)
    ran, ran_back = _raise_picks(problem, first), _raise_picks(problem, order)
    kept, roots_in_backward = saved, problem.tables.roots
    converting: tuple[int, ...] = ()
    if compressed:
        conversions = {node: problem.conversions[node] for node in sorted(compressed)}
        ran = _compressing(ran.tolist(), conversions)
        ran_back, roots_in_backward = _restoring(problem, ran_back.tolist(), conversions), roots_in_backward.copy()
        for node, conversion in conversions.items():
            roots_in_backward[roots_in_backward == node] = conversion.backward[-1]
            converting += (*conversion.forward, *conversion.backward)
        in_fp8 = [node for conversion in conversions.values() for node in conversion.saved]
        kept = (saved - conversions.keys()).union(in_fp8)
        ends = [*(node for node in ends if node not in conversions), *in_fp8]
    forward = _run(problem, ran, ends, set(), 0, problem.tables.roots)
    roots = {problem.roots[node] for node in kept}
    dropped = {problem.roots[node] for node in problem.forward_outputs} - roots
    saved_bytes = forward.end - sum(problem.bytes[node] for node in dropped if problem.is_operator[node])
    given = sum(problem.bytes[node] for node in problem.tangents)
    owned = {node for node in roots if not problem.is_input[node]} | set(problem.tangents)
    backward = _run(problem, ran_back, problem.backward_outputs, owned, saved_bytes + given, roots_in_backward)
    is_forward = problem.is_forward
    recomputed = tuple(node for node in backward.order if is_forward[node])
    return GraphSimulation(forward, backward, saved_bytes, saved, recomputed, converting)


def _compressing(order: Sequence[int], conversions: Mapping[int, Conversion]) -> np.ndarray:
    """Returns the forward's order with each activation compressed after its last reader."""
    steps = {node: step for step, node in enumerate(order)}
    behind: dict[int, list[int]] = {}
    for node in sorted(conversions, key=steps.__getitem__):
        last = max(steps[reader] for reader in conversions[node].readers if reader in steps)
        # If several activations have the same last reader, the later one is compressed first.
        behind[last] = [*conversions[node].forward, *behind.get(last, ())]
    return np.array([each for step, node in enumerate(order) for each in (node, *behind.get(step, ()))], dtype=np.intp)


def _restoring(problem: Problem, order: Sequence[int], conversions: Mapping[int, Conversion]) -> np.ndarray:
    """Returns the backward's order with each compressed activation restored before its first reader."""
    first: dict[int, int] = {}
    for step, node in enumerate(order):
        for read in problem.reads[node]:
            if read in conversions:
                first.setdefault(read, step)
    before: dict[int, list[int]] = {}
    for node, conversion in conversions.items():
        before.setdefault(first.get(node, len(order)), []).extend(conversion.backward)
    ran = [each for step, node in enumerate(order) for each in (*before.get(step, ()), node)]
    return np.array([*ran, *before.get(len(order), ())], dtype=np.intp)


def simulate_everything_saved(problem: Problem) -> GraphSimulation:
    """Simulate both graphs with all activations saved, as plain PyTorch does."""
    return simulate(problem, problem.closure(problem.activations))


def _orders(problem: Problem, saved: Collection[int]) -> tuple[list[int], list[int], list[int]]:
    """Returns the forward graph's operators, the nodes that it returns, and the backward graph's operators, before
    picks of outputs are moved to their operators."""
    order, always = backward_order(problem, saved), problem.tables.always
    numbers = {node for user in order for node in problem.tables.read_numbers[user]}
    ends = [*problem.forward_outputs, *saved, *numbers]
    return sorted(always | problem.needed([node for node in ends if node not in always], always)), ends, order


def backward_order(problem: Problem, saved: Collection[int]) -> list[int]:
    """Returns the backward graph's operators, before picks of outputs are moved to their operators."""
    reads = problem.reads
    done = bytearray(problem.is_input)
    for node in (*saved, *problem.numbers):
        done[node] = 1
    order: list[int] = []

    def add_missing(todo: list[int]) -> None:
        missing = []
        while todo:
            source = todo.pop()
            if not done[source]:
                done[source] = 1
                missing.append(source)
                todo.extend(reads[source])
        missing.sort()
        order.extend(missing)

    for node, operands in problem.tables.backward:
        for read in operands:
            if not done[read]:
                add_missing(list(operands))
                break
        done[node] = 1
        order.append(node)
    for node in problem.backward_outputs:
        add_missing([node])
    return order


def _raise_picks(problem: Problem, order: Sequence[int]) -> np.ndarray:
    """Returns the order with each pick of an output moved right after its operator, if that is in the same graph."""
    ran = np.array(order, dtype=np.intp)
    own = np.arange(len(ran))
    at = np.full(len(problem.names), -1, dtype=np.intp)
    at[ran] = own
    sources = problem.tables.picks[ran]
    operators = np.where(sources < 0, -1, at[sources])
    places = np.where(operators < 0, own, operators)
    # A pick from another pick's result moves to the place of that pick.
    while not np.array_equal(places, further := places[places]):
        places = further
    return ran[np.argsort(places, kind="stable")]


def _run(
    problem: Problem, ran: np.ndarray, ends: Iterable[int], owned: set[int], start: int, roots: np.ndarray
) -> RunMemory[int]:
    """Returns the memory of a graph's run, with allocations and frees as in `_events`.

    Args:
        ran: operators in order.
        ends: nodes that the graph returns.
        owned: roots of graph inputs that are freed after their last use.
        start: bytes held before the first operator.
        roots: the root of each node; for a compressed activation, the node that restores it.
    """
    if not len(ran):
        return RunMemory((), (), start)
    tables, steps = problem.tables, len(ran)
    step = np.arange(steps)
    at = np.full(len(problem.names), -1, dtype=np.intp)
    at[ran] = step
    counts = tables.reads[ran]
    places = np.repeat(tables.first_read[ran] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    users = np.repeat(step, counts)
    # The last step that reads each storage; `steps` if the graph returns it, -1 if nothing reads it.
    last = _last_users(tables, roots, places, users)
    last[[roots[node] for node in ends]] = steps
    allocated, freed = np.zeros(steps, dtype=np.int64), np.zeros(steps + 1, dtype=np.int64)
    here = (at[tables.storages] >= 0) & (at[tables.allocators] >= 0)
    np.add.at(allocated, at[tables.allocators[here]], tables.sizes[tables.storages[here]])
    given = np.array(sorted(owned), dtype=np.intp)
    ends_of_given = last[given]
    if (twice := at[given] >= 0).any():
        # The graph takes a storage as input and also computes its root: two storages of one root.
        both = given[twice]
        is_given = ~np.isin(tables.read_nodes[places], _computed(problem, ran, both))
        ends_of_given[twice] = _last_users(tables, roots, places[is_given], users[is_given])[both]
        computed = _last_users(tables, roots, places[~is_given], users[~is_given])[both]
        last[both] = np.where(last[both] == steps, steps, computed)
    for nodes, ends in ((ran, last[ran]), (given, ends_of_given)):
        np.add.at(freed, ends[ends >= 0], tables.sizes[nodes[ends >= 0]])
    freed[:steps] += np.where((last[ran] < 0) & tables.owns[ran], tables.sizes[ran], 0)
    after = start + np.cumsum(allocated - freed[:steps])
    during = after + freed[:steps] + tables.workspaces[ran]
    return RunMemory(tuple(ran.tolist()), tuple(during.tolist()), int(after[-1]))


def _computed(problem: Problem, ran: np.ndarray, roots: np.ndarray) -> list[int]:
    """Returns these roots, which operators in `ran` compute, and the nodes in `ran` that are views of them."""
    computed = set(roots.tolist())
    for node in ran.tolist():
        if problem.is_view[node] and any(read in computed for read in problem.reads[node]):
            computed.add(node)
    return list(computed)


def _last_users(tables: Tables, roots: np.ndarray, places: np.ndarray, users: np.ndarray) -> np.ndarray:
    """Returns the last step that reads each root, -1 if none does; `places` and `users` are in the order of steps."""
    last = np.full(len(tables.sizes), -1, dtype=np.intp)
    # numpy keeps the last of several values assigned to one index.
    last[roots[tables.read_nodes[places]]] = users
    return last


def problem_events(
    problem: Problem, saved: frozenset[int], rows: Mapping[str, str] | None = None, on_host: Collection[int] = ()
) -> GraphEvents:
    """Returns the events of both graphs, operator by operator; `simulate` computes the same in arrays.

    Args:
        saved: see `simulate`.
        rows: cluster ids of saved activations, by node name.
        on_host: saved nodes that are offloaded to the host, counted as 0 bytes.
    """
    names, roots, at, rows = problem.names, problem.roots, problem.positions, rows or {}
    modules = problem.modules or ("",) * len(names)
    forward, ends, backward = _orders(problem, saved)
    first, second = (_raise_picks(problem, run).tolist() for run in (forward, backward))
    saved_roots = {roots[node] for node in saved}
    away = {roots[node] for node in on_host} & saved_roots
    read = {roots[node] for user in second for node in problem.reads[user]}
    of_forward, of_backward = set(first), set(second)
    gradients = {roots[node] for node in problem.backward_outputs}

    def size(node: int) -> int:
        return 0 if node in away else problem.bytes[node]

    def in_forward(node: int) -> Storage:
        category, kind = TEMPORARY, operator_of(problem, node)
        if node in saved_roots:
            category, kind = SAVED, rows.get(names[node]) or kind
        return Storage(names[node], size(node), category, kind, problem.layers[node], modules[node])

    def in_backward(node: int) -> Storage:
        category = RECOMPUTED if node in of_forward else GRADIENTS if node in gradients else TEMPORARY
        name, kind = BACKWARD + names[node], operator_of(problem, node)
        return Storage(name, size(node), category, kind, problem.layers[node], modules[node])

    def name_in_backward(node: int) -> str:
        return BACKWARD + names[node] if node in of_backward else names[node]

    def placed(positions: Sequence[int | None], nodes: Sequence[int]) -> Iterator[tuple[int | None, int]]:
        return zip(positions or (None,) * len(nodes), nodes, strict=True)

    inputs = {
        position: Storage(names[node], problem.bytes[node], SAVED if node in read else TEMPORARY, "input")
        for node, position in at.inputs.items()
    }
    computed = [node for node in sorted(saved_roots) if not problem.is_input[node]]
    saved_inputs = [node for node in at.inputs if node in read]
    owned = {*computed, *problem.tangents, *saved_inputs}
    tangents = placed(at.tangents, problem.tangents)
    events = GraphEvents(
        tuple(_events(problem, first, ends, (), in_forward, lambda node: names[node])),
        tuple(_events(problem, second, problem.backward_outputs, owned, in_backward, name_in_backward)),
        inputs,
        tuple((position, names[roots[node]]) for position, node in placed(at.outputs, problem.forward_outputs)),
        tuple(map(in_forward, computed)),
        frozenset(names[node] for node in saved_inputs),
        tuple((position, Storage(names[node], size(node), TEMPORARY, "tangent")) for position, node in tangents),
        tuple(
            (position, name_in_backward(roots[node]))
            for position, node in placed(at.gradients, problem.backward_outputs)
        ),
        layouts=at.layouts,
        accumulations=frozenset(
            position
            for position, node in placed(at.gradients, problem.backward_outputs)
            if position is not None and node in problem.accumulations
        ),
    )
    return events.as_run()


def _events(
    problem: Problem,
    order: Sequence[int],
    ends: Iterable[int],
    owned: Collection[int],
    storage_of: Callable[[int], Storage],
    name_of: Callable[[int], str],
) -> Iterator[Event]:
    """Yields the events of a graph's run.

    Args:
        order: operators in order.
        ends: nodes that the graph returns.
        owned: roots of graph inputs that are freed after their last use.
        storage_of: returns the storage of an allocated root.
        name_of: returns the name of a root's storage.
    """
    here = set(order)
    last = _last_reads(problem, order, ends)
    freed: dict[int, list[int]] = {}
    for node in (*order, *sorted(owned)):
        if node in last:
            freed.setdefault(last[node], []).append(node)
    for step, node in enumerate(order):
        is_unread = node not in last and problem.tables.owns[node]
        yield Event(
            problem.names[node],
            operator_of(problem, node),
            problem.layers[node],
            tuple(storage_of(root) for root in problem.allocates[node] if root in here),
            problem.workspaces[node],
            tuple(name_of(root) for root in (*freed.get(step, ()), *([node] if is_unread else ()))),
        )


def _last_reads(problem: Problem, order: Sequence[int], ends: Iterable[int]) -> dict[int, int]:
    """Returns the last step of an order that reads each root; the order's length if the graph returns the root."""
    last = {problem.roots[read]: step for step, node in enumerate(order) for read in problem.reads[node]}
    return last | {problem.roots[node]: len(order) for node in ends}


def operator_of(problem: Problem, node: int) -> str:
    """Returns a node's operator name: `gelu` for `aten.gelu.default`; for the pick of an output, its operator's."""
    source = problem.picks[node]
    parts = problem.kinds[node if source is None else source].split(".")
    return parts[min(1, len(parts) - 1)]


def held_at_peak(problem: Problem, simulation: GraphSimulation, in_backward: bool) -> dict[int, int]:
    """Returns the bytes of the storages held at the first operator at a run's peak, by root."""
    run = simulation.backward if in_backward else simulation.forward
    peak = run.held.index(run.peak) if run.held else 0
    ends = problem.backward_outputs if in_backward else (*problem.forward_outputs, *simulation.saved)
    last = _last_reads(problem, run.order, ends)
    given = {problem.roots[node] for node in (*simulation.saved, *problem.tangents)} if in_backward else set()
    here = set(run.order)
    allocated = {storage for node in run.order[:peak] for storage in problem.allocates[node] if storage in here}
    new = {storage for node in run.order[peak : peak + 1] for storage in problem.allocates[node] if storage in here}
    held = {node for node in allocated | given if last.get(node, -1) >= peak}
    return {node: problem.bytes[node] for node in sorted(held | new)}
