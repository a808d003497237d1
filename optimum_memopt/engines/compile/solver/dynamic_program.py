"""The first solver: measures a frontier for each class of blocks, and picks one point for each block by a dynamic
program.

The roots that leave a block are saved, so each block's plan changes the peak in two ways only: by the bytes that it
keeps allocated during all later blocks of the forward, and by the peak of its own part of forward and backward. Pure.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, simulate
from optimum_memopt.engines.compile.solver.blocks import Block, Blocks

# Number of steps of saved bytes that the dynamic program distinguishes.
_STEPS = 4000
# Maximum number of corrections of the dynamic program's own budget by the simulated peak.
_TRIES = 8
# Cost of a plan's last byte relative to its average byte; not tuned.
_MARGINAL = 2


class FrontierPoint(NamedTuple):
    """One way to run a block; bytes and seconds are relative to saving everything.

    A rise is that of the peak of the block's part of the forward, or of the backward.
    """

    saved: frozenset[int]
    saved_bytes: int
    forward_rise: int
    backward_rise: int
    seconds: float

    def is_as_good_as(self, other: "FrontierPoint") -> bool:
        return all(mine <= theirs for mine, theirs in zip(self[1:], other[1:], strict=True))


_Frontier = tuple[FrontierPoint, ...]
# Peaks in bytes of a block's part of the forward, and of the backward.
_Tops = tuple[int, int]


@dataclass(frozen=True)
class DynamicProgram:
    """Solves for any budget on the measured frontiers of a problem's blocks; `tops` are the blocks' peaks with
    everything saved."""

    blocks: Blocks
    everything: GraphSimulation
    tops: tuple[_Tops, ...]
    frontiers: tuple[_Frontier, ...]

    def choose(self, limit: int) -> tuple[FrontierPoint, ...]:
        """Returns a point for each block, fastest in total with no part above the limit; empty if that is impossible.

        Exact except for rounding to `_STEPS`, and for storages that blocks share; the caller simulates the result.
        """
        least = sum(min(point.saved_bytes for point in points) for points in self.frontiers)
        most = sum(max(point.saved_bytes for point in points) for points in self.frontiers)
        step = max(1.0, (most - least) / _STEPS)
        saved_bytes, seconds = np.zeros(1), np.zeros(1)
        history = []
        for (forward_top, backward_top), points in zip(self.tops, self.frontiers, strict=True):
            parts = []
            for number, point in enumerate(points):
                rise = max(forward_top + point.forward_rise, backward_top + point.backward_rise)
                # `saved_bytes` is ascending.
                fits = np.searchsorted(saved_bytes, limit - rise, side="right")
                sums, times = saved_bytes[:fits] + point.saved_bytes, seconds[:fits] + point.seconds
                parts.append((sums, times, np.arange(fits), np.full(fits, number)))
            sums, times, before, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
            if not len(sums):
                return ()
            best = _undominated(sums, times, step)
            saved_bytes, seconds = sums[best], times[best]
            history.append((before[best], numbers[best]))
        place = int(np.lexsort((saved_bytes, seconds))[0])
        chosen = []
        for points, (before, numbers) in zip(reversed(self.frontiers), reversed(history), strict=True):
            chosen.append(points[numbers[place]])
            place = before[place]
        return tuple(reversed(chosen))

    def solve(self, budget: int) -> GraphSimulation | None:
        """Returns the fastest plan found whose simulated peak is within the budget; None if there is none."""
        best: GraphSimulation | None = None
        asked, low, high, times = budget, 0, 0, 1
        seen: set[frozenset[int]] = set()
        dropped: frozenset[int] | None = None
        for _ in range(_TRIES):
            chosen = self.choose(asked)
            if not chosen and not high:
                break
            if not chosen:
                low = asked
                asked = (low + high) // 2
                continue
            if dropped is None:
                dropped = self._cheap_outside(self.simulate(chosen))
            simulation = self.simulate(chosen, dropped)
            fits = simulation.peak <= budget
            if fits and (best is None or self._extra_seconds(simulation) < self._extra_seconds(best)):
                best = simulation
            if fits and simulation.saved in seen:
                break
            seen.add(simulation.saved)
            # Storages that blocks share make the simulated peak higher or lower than the dynamic program's.
            low, high = (asked, high) if fits else (low, asked)
            if low and high:
                asked = (low + high) // 2
            elif fits:
                asked += budget - simulation.peak
            else:
                # The exact correction may again lead to a plan that is over by as much, so the correction doubles.
                asked -= (simulation.peak - budget) * times
                times *= 2
        return best

    def lowest(self) -> GraphSimulation:
        """Returns the plan with the lowest peak found."""
        low, high = 0, self.everything.peak
        best = self.everything
        while high - low > max(1, self.everything.peak // 10_000):
            middle = (low + high) // 2
            if chosen := self.choose(middle):
                high = middle
                best = min(best, self.simulate(chosen), key=lambda simulation: simulation.peak)
            else:
                low = middle
        return best

    def simulate(self, chosen: Sequence[FrontierPoint], dropped: Collection[int] = ()) -> GraphSimulation:
        """Simulate the graph with the chosen points' nodes saved, except those in `dropped`."""
        saved = frozenset().union(*(point.saved for point in chosen)).difference(dropped)
        return simulate(self.blocks.problem, self.blocks.problem.closure(saved))

    def _cheap_outside(self, simulation: GraphSimulation) -> frozenset[int]:
        """Returns nodes outside of layers that a plan saves for recompute in layers, such as an attention mask, and
        that are cheaper to recompute for their bytes than the plan's own: no plan of one block alone reveals them."""
        problem = self.blocks.problem
        dropped: frozenset[int] = frozenset()
        for node in sorted(simulation.saved - self.everything.saved):
            if problem.layers[node] or problem.is_kept[node]:
                continue
            without = simulate(problem, problem.closure(simulation.saved - {node}))
            gained = self.everything.peak - simulation.peak
            before = self._extra_seconds(simulation)
            more = self._extra_seconds(without) - before
            if more * gained < _MARGINAL * before * (simulation.peak - without.peak):
                dropped, simulation = dropped | {node}, without
        return dropped

    def _extra_seconds(self, simulation: GraphSimulation) -> float:
        return simulation.extra_seconds(self.blocks.problem)


def _undominated(sums: np.ndarray, times: np.ndarray, step: float) -> np.ndarray:
    """Returns the indices of the fastest of all sums with nearly the same bytes (`step`), without those that are no
    faster than one with fewer bytes; ascending by bytes."""
    places = np.round(sums / step).astype(np.intp)
    places -= places.min()
    fastest = np.full(places.max() + 1, np.inf)
    np.minimum.at(fastest, places, times)
    # Sorting only the fastest takes a quarter of the time of sorting all.
    (fast,) = np.nonzero(times == fastest[places])
    order = fast[np.lexsort((sums[fast], places[fast]))]
    before = np.minimum.accumulate(times[order])
    best: np.ndarray = order[np.concatenate(([True], times[order][1:] < before[:-1]))]
    return best


def dynamic_programs(blocks: Blocks) -> tuple[DynamicProgram, DynamicProgram]:
    """Returns a dynamic program that saves all roots that leave blocks, and one with further points that recompute
    them.

    Each point is measured alone. If many blocks recompute the roots that leave them, all of these are in memory when
    the backward begins, which only the simulation of the result shows.
    """
    everything = simulate(blocks.problem, blocks.problem.closure(blocks.leaving | blocks.problem.activations))
    tops = _tops(blocks, everything)
    kinds = blocks.with_borders, blocks.without_borders
    with_borders, further = (_measured(blocks, everything, tops, sets_of) for sets_of in kinds)
    without_borders = {index: reduce(_with, further[index], points) for index, points in with_borders.items()}

    def program(measured: Mapping[int, _Frontier]) -> DynamicProgram:
        """Returns a dynamic program with the frontiers of all blocks, from those of one block in each class."""
        sources = [blocks.representatives[first] for first in blocks.classes]
        of_all = tuple(
            tuple(point._replace(saved=blocks.translated(point.saved, source, index)) for point in measured[source])
            for index, source in enumerate(sources)
        )
        return DynamicProgram(blocks, everything, tops, of_all)

    return program(with_borders), program(without_borders)


def _measured(
    blocks: Blocks,
    everything: GraphSimulation,
    tops: Sequence[_Tops],
    sets_of: Callable[[Block], tuple[frozenset[int], ...]],
) -> dict[int, _Frontier]:
    """Returns the frontier of each class's representative, without points that another one is as good as.

    A simulation measures one point of each representative, while all other blocks save everything.
    """
    problem = blocks.problem
    sets = {index: sets_of(blocks.all[index]) for index in blocks.representatives.values()}
    elsewhere = (blocks.leaving | problem.activations).difference(*(blocks.all[index].members for index in sets))
    base = _recompute_seconds(blocks, everything)
    frontiers: dict[int, _Frontier] = dict.fromkeys(sets, ())
    sets = {index: points for index, points in sets.items() if points}
    for number in range(max(map(len, sets.values()), default=0)):
        saved = {index: points[min(number, len(points) - 1)] for index, points in sets.items()}
        simulation = simulate(problem, problem.closure(elsewhere.union(*saved.values())))
        more_bytes = _saved_bytes(blocks, everything, simulation, sorted(sets))
        seconds = _recompute_seconds(blocks, simulation)
        before = 0
        for index, (forward, backward) in enumerate(_tops(blocks, simulation)):
            if index in sets:
                rises = forward - before - tops[index][0], backward - before - tops[index][1]
                point = FrontierPoint(saved[index], more_bytes[index], *rises, seconds[index] - base[index])
                frontiers[index] = _with(frontiers[index], point)
                before += more_bytes[index]
    return frontiers


def _with(frontier: _Frontier, point: FrontierPoint) -> _Frontier:
    if any(other.is_as_good_as(point) for other in frontier):
        return frontier
    return (*(other for other in frontier if not point.is_as_good_as(other)), point)


def _saved_bytes(
    blocks: Blocks, everything: GraphSimulation, simulation: GraphSimulation, measured: list[int]
) -> dict[int, int]:
    """Returns the bytes that each measured block leaves for the backward, relative to saving everything.

    A root that leaves its block counts for the measured block that alone reads it, which is recomputed from it; if
    several blocks read it (an attention mask), it counts for its own block.
    """
    more = dict.fromkeys(measured, 0)
    # By storage: a graph saves as a view what it reads of another graph.
    now, before = (frozenset(blocks.problem.roots[node] for node in ran.saved) for ran in (simulation, everything))
    for sign, nodes in ((1, now - before), (-1, before - now)):
        for node in nodes:
            behind = (index for index in measured if index >= blocks.index[node])
            reader = _only_reader(blocks, node) if node in blocks.leaving else None
            more[reader if reader in more else next(behind, measured[-1])] += sign * blocks.problem.bytes[node]
    return more


def _only_reader(blocks: Blocks, root: int) -> int | None:
    """Returns the only other block that reads a root; None if there are several or none."""
    readers = set()
    todo = [root]
    while todo:
        for user in blocks.problem.users[todo.pop()]:
            if blocks.problem.is_view[user]:
                todo.append(user)
            elif user in blocks.index:
                readers.add(blocks.index[user])
    readers.discard(blocks.index[root])
    return readers.pop() if len(readers) == 1 else None


def _recompute_seconds(blocks: Blocks, simulation: GraphSimulation) -> list[float]:
    """Returns the recompute seconds of each block."""
    seconds = [0.0] * len(blocks.all)
    for node in simulation.recomputed:
        if node in blocks.index:
            seconds[blocks.index[node]] += blocks.problem.seconds[node]
    return seconds


def _tops(blocks: Blocks, simulation: GraphSimulation) -> tuple[_Tops, ...]:
    """Returns the peaks in bytes of each block's part of the forward and of the backward."""
    order = np.array(simulation.forward.order, dtype=np.intp)
    index = blocks.index_table[order]
    # An operator in no block counts for the block before it, or for the first block if there is none.
    last = np.maximum.accumulate(np.where(index < 0, 0, np.arange(len(order))))
    forward = np.zeros(len(blocks.all), dtype=np.int64)
    np.maximum.at(forward, np.maximum(index[last], 0), np.array(simulation.forward.held, dtype=np.int64))
    backward = _backward_tops(blocks, simulation)
    return tuple((int(top), backward.get(index, 0)) for index, top in enumerate(forward))


def _backward_tops(blocks: Blocks, simulation: GraphSimulation) -> dict[int, int]:
    """Returns the peak of each block's part of the backward: a layer's part reaches from its first to its last
    operator, and the other blocks' parts lie between those."""
    order = np.array(simulation.backward.order, dtype=np.intp)
    held = np.array(simulation.backward.held, dtype=np.int64)
    index = blocks.layer_table[order]
    (steps,) = np.nonzero(index >= 0)
    layers, firsts = np.unique(index[steps], return_index=True)
    _, lasts = np.unique(index[steps][::-1], return_index=True)
    spans = sorted(zip(steps[firsts].tolist(), steps[::-1][lasts].tolist(), layers.tolist(), strict=True))
    tops = {layer: int(held[first : last + 1].max()) for first, last, layer in spans}
    before = -1
    behind = len(blocks.all) - 1
    for first, last, layer in [*spans, (len(held), len(held), -1)]:
        between = held[before + 1 : first]
        for other in range(layer + 1, behind + 1):
            if len(between) and not blocks.all[other].layer:
                tops[other] = max(tops.get(other, 0), int(between.max()))
        before, behind = max(before, last), layer - 1 if layer >= 0 else behind
    return tops
