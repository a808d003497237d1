"""The first solver: plans for each class of blocks, and a dynamic program that picks one for each block.

What leaves a block is saved where it is needed, so each block's plan changes the peak in two ways only: by the bytes
that it leaves to all later blocks of the forward, and by how high its own part of forward and backward rises.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import Simulation, simulate
from optimum_memopt.engines.compile.solver.blocks import Blocks
from optimum_memopt.engines.compile.solver.frontiers import LayerFrontiers

# Steps of saved bytes that the dynamic program tells apart.
_STEPS = 4000
# What the last byte of a plan costs against the average one; not tuned.
_MARGINAL = 2


@dataclass(frozen=True)
class FrontierPoint:
    """One way to run a block; bytes and seconds are over those where everything is saved.

    Attributes:
        kept: roots to save.
        stashed: bytes from its forward to its backward; negative, mostly.
        forward_rise: bytes at the highest point of its part of the forward.
        backward_rise: bytes at the highest point of its part of the backward.
        seconds: of what it recomputes.
    """

    kept: frozenset[int]
    stashed: int
    forward_rise: int
    backward_rise: int
    seconds: float

    def is_as_good_as(self, other: "FrontierPoint") -> bool:
        mine = (self.stashed, self.forward_rise, self.backward_rise, self.seconds)
        others = (other.stashed, other.forward_rise, other.backward_rise, other.seconds)
        return all(ours <= theirs for ours, theirs in zip(mine, others, strict=True))


@dataclass(frozen=True)
class DynamicProgram:
    """The frontiers of a problem's blocks, measured, for any budget.

    Attributes:
        blocks: of the problem.
        unmeasured: what each plan keeps.
        everything: the simulation in which all saved activations are saved.
        tops: highest bytes of each block's part of the forward, and of the backward, in that one.
        frontiers: the plans of each block.
    """

    blocks: Blocks
    unmeasured: LayerFrontiers
    everything: Simulation
    tops: tuple[tuple[int, int], ...]
    frontiers: tuple[tuple[FrontierPoint, ...], ...]

    def choose(self, budget: int) -> tuple[frozenset[int], ...]:
        """What each block saves under the least time with which no part passes the budget; empty where there is none.

        Exact but for the rounding of `_STEPS`, and for what blocks share; the caller simulates the result.

        Args:
            budget: bytes.
        """
        least = sum(min(plan.stashed for plan in plans) for plans in self.frontiers)
        most = sum(max(plan.stashed for plan in plans) for plans in self.frontiers)
        step = max(1.0, (most - least) / _STEPS)
        stashed, seconds = np.zeros(1), np.zeros(1)
        history = []
        for (forward_top, backward_top), plans in zip(self.tops, self.frontiers, strict=True):
            parts = []
            for number, plan in enumerate(plans):
                rise = max(forward_top + plan.forward_rise, backward_top + plan.backward_rise)
                # Bytes rise from one to the next.
                fits = np.searchsorted(stashed, budget - rise, side="right")
                sums, times = stashed[:fits] + plan.stashed, seconds[:fits] + plan.seconds
                parts.append((sums, times, np.arange(fits), np.full(fits, number)))
            sums, times, before, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
            if not len(sums):
                return ()
            kept = _frontier(sums, times, step)
            stashed, seconds = sums[kept], times[kept]
            history.append((before[kept], numbers[kept]))
        place = int(np.lexsort((stashed, seconds))[0])
        chosen = []
        for plans, (before, numbers) in zip(reversed(self.frontiers), reversed(history), strict=True):
            chosen.append(plans[numbers[place]].kept)
            place = before[place]
        return tuple(reversed(chosen))

    def solve(self, budget: int, tries: int = 8) -> Simulation | None:
        """The fastest plan found whose simulated peak is within the budget.

        Args:
            budget: bytes.
            tries: how often the dynamic program's own budget is corrected by the simulated peak.
        """
        problem, best = self.blocks.problem, None
        asked, low, high, times = budget, 0, 0, 1
        seen: set[frozenset[int]] = set()
        dropped: frozenset[int] | None = None
        for _ in range(tries):
            chosen = self.choose(asked)
            if not chosen and not high:
                break
            if not chosen:
                low = asked
                asked = (low + high) // 2
                continue
            if dropped is None:
                dropped = self._cheap_outside(simulate(problem, self.closure(chosen)))
            found = simulate(problem, self.closure(chosen, dropped))
            fits = found.peak <= budget
            if fits and (best is None or found.extra_seconds(problem) < best.extra_seconds(problem)):
                best = found
            if fits and found.saved in seen:
                break
            seen.add(found.saved)
            # What blocks share takes room that the dynamic program does not see, or leaves some.
            low, high = (asked, high) if fits else (low, asked)
            if low and high:
                asked = (low + high) // 2
            elif fits:
                asked += budget - found.peak
            else:
                # The exact correction may be met by a plan that is over by as much, again and again.
                asked -= (found.peak - budget) * times
                times *= 2
        return best

    def lowest(self) -> Simulation:
        """The plan with the lowest peak that is found."""
        low, high = 0, self.everything.peak
        best = self.everything
        while high - low > max(1, self.everything.peak // 10_000):
            middle = (low + high) // 2
            chosen = self.choose(middle)
            if not chosen:
                low = middle
                continue
            high = middle
            found = simulate(self.blocks.problem, self.closure(chosen))
            best = min(best, found, key=lambda simulation: simulation.peak)
        return best

    def closure(self, chosen: Sequence[frozenset[int]], dropped: Collection[int] = ()) -> frozenset[int]:
        """All that is saved under a plan of each block, but for what is `dropped`."""
        return self.blocks.problem.closure(frozenset().union(*chosen).difference(dropped))

    def _cheap_outside(self, found: Simulation) -> frozenset[int]:
        """What a plan saves outside of the layers for recompute within them, such as an attention mask, and that is
        cheaper to recompute than what the plan does: no plan of one block alone shows this."""
        problem, layers = self.blocks.problem, self.blocks.problem.layers
        dropped: frozenset[int] = frozenset()
        for node in sorted(found.saved - self.everything.saved):
            if layers[node] or problem.is_kept[node]:
                continue
            without = simulate(problem, problem.closure(found.saved - {node}))
            gained = self.everything.peak - found.peak
            seconds, before = (one.extra_seconds(problem) for one in (without, found))
            if (seconds - before) * gained < _MARGINAL * before * (found.peak - without.peak):
                dropped, found = dropped | {node}, without
        return dropped

    @cached_property
    def without_borders(self) -> "DynamicProgram":
        """With further plans, which recompute what leaves a block.

        A plan is measured alone. If many blocks recompute what leaves them, it is there for all of them when the
        backward begins, which only the simulation of the result shows.
        """
        measured = _measured(self.blocks, self.everything, self.tops, self.unmeasured.without_borders)
        return replace(
            self,
            frontiers=tuple(
                reduce(_with, more, plans)
                for plans, more in zip(self.frontiers, _for_all(self.blocks, measured), strict=True)
            ),
        )


def _frontier(sums: np.ndarray, times: np.ndarray, step: float) -> np.ndarray:
    """Of all with nearly the same bytes the fastest, and only if nothing with fewer bytes is as fast; by their bytes.

    Args:
        sums: bytes of each.
        times: seconds of each.
        step: bytes that are nearly the same.
    """
    places = np.round(sums / step).astype(np.intp)
    places -= places.min()
    fastest = np.full(places.max() + 1, np.inf)
    np.minimum.at(fastest, places, times)
    # Sorting those alone, and not all, takes a quarter of the time.
    (found,) = np.nonzero(times == fastest[places])
    order = found[np.lexsort((sums[found], places[found]))]
    before = np.minimum.accumulate(times[order])
    kept: np.ndarray = order[np.concatenate(([True], times[order][1:] < before[:-1]))]
    return kept


def dynamic_program(problem: Problem, frontiers: LayerFrontiers | None = None) -> DynamicProgram:
    """Make and measure the frontiers: one for each class of blocks.

    Args:
        problem: to solve.
        frontiers: those of the problem among any other graphs, where they are known.
    """
    frontiers = frontiers or LayerFrontiers(problem)
    blocks = replace(frontiers.blocks, problem=problem)
    everything = simulate(problem, problem.closure(blocks.leaving | problem.activations))
    tops = _tops(blocks, everything)
    measured = _measured(blocks, everything, tops, frontiers.with_borders)
    return DynamicProgram(blocks, frontiers, everything, tops, _for_all(blocks, measured))


def _for_all(
    blocks: Blocks, measured: Mapping[int, tuple[FrontierPoint, ...]]
) -> tuple[tuple[FrontierPoint, ...], ...]:
    """The plans of all blocks, of which one a class was measured."""
    representatives = {blocks.classes[index]: index for index in blocks.representatives}
    return tuple(
        tuple(_moved(blocks, plan, representatives[first], index) for plan in measured[representatives[first]])
        for index, first in enumerate(blocks.classes)
    )


def _moved(blocks: Blocks, plan: FrontierPoint, source: int, target: int) -> FrontierPoint:
    return replace(plan, kept=blocks.translated(plan.kept, source, target))


def _measured(
    blocks: Blocks,
    everything: Simulation,
    tops: Sequence[tuple[int, int]],
    frontiers: Mapping[int, Sequence[frozenset[int]]],
) -> dict[int, tuple[FrontierPoint, ...]]:
    """The plans of some blocks, without those that another one is as good as.

    A simulation measures one plan of each block, while all other blocks save everything.

    Args:
        blocks: of a problem.
        everything: the simulation in which all saved activations are saved.
        tops: of that one.
        frontiers: what each plan keeps, for each block that is measured.
    """
    problem = blocks.problem
    others = (blocks.leaving | problem.activations).difference(*(blocks.all[index].members for index in frontiers))
    base = _recompute_seconds(blocks, everything)
    found: dict[int, tuple[FrontierPoint, ...]] = dict.fromkeys(frontiers, ())
    frontiers = {index: plans for index, plans in frontiers.items() if plans}
    for number in range(max(map(len, frontiers.values()), default=0)):
        kept = {index: plans[min(number, len(plans) - 1)] for index, plans in frontiers.items()}
        simulation = simulate(problem, problem.closure(others.union(*kept.values())))
        stashed = _stashed_more(blocks, everything, simulation, sorted(frontiers))
        seconds = _recompute_seconds(blocks, simulation)
        before = 0
        for index, (forward, backward) in enumerate(_tops(blocks, simulation)):
            if index in frontiers:
                plan = FrontierPoint(
                    kept[index],
                    stashed[index],
                    forward - before - tops[index][0],
                    backward - before - tops[index][1],
                    seconds[index] - base[index],
                )
                found[index] = _with(found[index], plan)
                before += stashed[index]
    return found


def _with(plans: tuple[FrontierPoint, ...], plan: FrontierPoint) -> tuple[FrontierPoint, ...]:
    if any(other.is_as_good_as(plan) for other in plans):
        return plans
    return (*(other for other in plans if not plan.is_as_good_as(other)), plan)


def _stashed_more(
    blocks: Blocks, everything: Simulation, found: Simulation, measured: Sequence[int]
) -> dict[int, int]:
    """Bytes that each measured block leaves for the backward, over those where everything is saved.

    What leaves a block, and is saved since a measured one is recomputed from it, counts for that one; what several
    read (an attention mask), for its own.
    """
    problem = blocks.problem
    more = dict.fromkeys(measured, 0)
    for sign, nodes in ((1, found.saved - everything.saved), (-1, everything.saved - found.saved)):
        for node in nodes:
            index = blocks.index[node]
            behind = (one for one in measured if one >= index)
            reader = _only_reader(blocks, node) if node in blocks.leaving else None
            more[reader if reader in more else next(behind, measured[-1])] += sign * problem.bytes[node]
    return more


def _only_reader(blocks: Blocks, root: int) -> int | None:
    """The block that alone reads what leaves another one; None where several do."""
    problem = blocks.problem
    found = set()
    todo = [root]
    while todo:
        for user in problem.users[todo.pop()]:
            if problem.is_view[user]:
                todo.append(user)
            elif user in blocks.index:
                found.add(blocks.index[user])
    found.discard(blocks.index[root])
    return found.pop() if len(found) == 1 else None


def _recompute_seconds(blocks: Blocks, found: Simulation) -> list[float]:
    """Of each block."""
    seconds = [0.0] * len(blocks.all)
    for node in found.recomputed:
        if node in blocks.index:
            seconds[blocks.index[node]] += blocks.problem.seconds[node]
    return seconds


def _tops(blocks: Blocks, found: Simulation) -> tuple[tuple[int, int], ...]:
    """The highest bytes of each block's part of the forward and of the backward."""
    forward = _forward_tops(blocks, found)
    backward = _backward_tops(blocks, found)
    return tuple((forward.get(index, 0), backward.get(index, 0)) for index in range(len(blocks.all)))


def _forward_tops(blocks: Blocks, found: Simulation) -> dict[int, int]:
    order = np.array(found.forward.order, dtype=np.intp)
    index = blocks.index_table[order]
    # What is in no block runs within the one before it; what runs before all, within the first.
    last = np.maximum.accumulate(np.where(index < 0, 0, np.arange(len(order))))
    return _highest(np.maximum(index[last], 0), np.array(found.forward.held, dtype=np.int64))


def _backward_tops(blocks: Blocks, found: Simulation) -> dict[int, int]:
    """The parts of layers from the first to the last of their operators; of the others what lies between those."""
    order = np.array(found.backward.order, dtype=np.intp)
    held = np.array(found.backward.held, dtype=np.int64)
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


def _highest(keys: np.ndarray, held: np.ndarray) -> dict[int, int]:
    """The highest bytes by key."""
    tops = np.zeros(keys.max(initial=0) + 1, dtype=np.int64)
    np.maximum.at(tops, keys, held)
    return dict(enumerate(tops.tolist()))
