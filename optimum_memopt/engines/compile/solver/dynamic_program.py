"""The first solver: plans for each class of units, and a dynamic program that picks one for each unit.

What leaves a unit is saved where it is needed, so each unit's plan changes the peak in two ways only: by the bytes
that it leaves to all later units of the forward, and by how high its own part of forward and backward rises.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.memory.simulation import Simulation, simulate
from optimum_memopt.engines.compile.solver.blocks import Units
from optimum_memopt.engines.compile.solver.frontiers import Menus

# Steps of saved bytes that the dynamic program tells apart.
_STEPS = 4000
# What the last byte of a plan costs against the average one; not tuned.
_MARGINAL = 2


@dataclass(frozen=True)
class UnitPlan:
    """One way to run a unit; bytes and seconds are over those where everything is saved.

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

    def is_as_good_as(self, other: "UnitPlan") -> bool:
        mine = (self.stashed, self.forward_rise, self.backward_rise, self.seconds)
        others = (other.stashed, other.forward_rise, other.backward_rise, other.seconds)
        return all(ours <= theirs for ours, theirs in zip(mine, others, strict=True))


@dataclass(frozen=True)
class TwoLevel:
    """The menus of a problem's units, measured, for any budget.

    Attributes:
        units: of the problem.
        unmeasured: what each plan keeps.
        everything: the simulation in which all saved activations are saved.
        tops: highest bytes of each unit's part of the forward, and of the backward, in that one.
        menus: the plans of each unit.
    """

    units: Units
    unmeasured: Menus
    everything: Simulation
    tops: tuple[tuple[int, int], ...]
    menus: tuple[tuple[UnitPlan, ...], ...]

    def choose(self, budget: int) -> tuple[frozenset[int], ...]:
        """What each unit saves under the least time with which no part passes the budget; empty where there is none.

        Exact but for the rounding of `_STEPS`, and for what units share; the caller simulates the result.

        Args:
            budget: bytes.
        """
        least = sum(min(plan.stashed for plan in plans) for plans in self.menus)
        most = sum(max(plan.stashed for plan in plans) for plans in self.menus)
        step = max(1.0, (most - least) / _STEPS)
        stashed, seconds = np.zeros(1), np.zeros(1)
        history = []
        for (forward_top, backward_top), plans in zip(self.tops, self.menus, strict=True):
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
        for plans, (before, numbers) in zip(reversed(self.menus), reversed(history), strict=True):
            chosen.append(plans[numbers[place]].kept)
            place = before[place]
        return tuple(reversed(chosen))

    def solve(self, budget: int, tries: int = 8) -> Simulation | None:
        """The fastest plan found whose simulated peak is within the budget.

        Args:
            budget: bytes.
            tries: how often the dynamic program's own budget is corrected by the simulated peak.
        """
        problem, best = self.units.problem, None
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
            # What units share takes room that the dynamic program does not see, or leaves some.
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
            found = simulate(self.units.problem, self.closure(chosen))
            best = min(best, found, key=lambda simulation: simulation.peak)
        return best

    def closure(self, chosen: Sequence[frozenset[int]], dropped: Collection[int] = ()) -> frozenset[int]:
        """All that is saved under a plan of each unit, but for what is `dropped`."""
        return self.units.problem.closure(frozenset().union(*chosen).difference(dropped))

    def _cheap_outside(self, found: Simulation) -> frozenset[int]:
        """What a plan saves outside of the layers for recompute within them, such as an attention mask, and that is
        cheaper to recompute than what the plan does: no plan of one unit alone shows this."""
        problem, layers = self.units.problem, self.units.problem.layers
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
    def without_borders(self) -> "TwoLevel":
        """With further plans, which recompute what leaves a unit.

        A plan is measured alone. If many units recompute what leaves them, it is there for all of them when the
        backward begins, which only the simulation of the result shows.
        """
        measured = _measured(self.units, self.everything, self.tops, self.unmeasured.without_borders)
        return replace(
            self,
            menus=tuple(
                reduce(_with, more, plans)
                for plans, more in zip(self.menus, _for_all(self.units, measured), strict=True)
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


def two_level(problem: Problem, menus: Menus | None = None) -> TwoLevel:
    """Make and measure the menus: one for each class of units.

    Args:
        problem: to solve.
        menus: those of the problem among any other graphs, where they are known.
    """
    menus = menus or Menus(problem)
    units = replace(menus.units, problem=problem)
    everything = simulate(problem, problem.closure(units.leaving | problem.activations))
    tops = _tops(units, everything)
    measured = _measured(units, everything, tops, menus.with_borders)
    return TwoLevel(units, menus, everything, tops, _for_all(units, measured))


def _for_all(units: Units, measured: Mapping[int, tuple[UnitPlan, ...]]) -> tuple[tuple[UnitPlan, ...], ...]:
    """The plans of all units, of which one a class was measured."""
    representatives = {units.classes[index]: index for index in units.representatives}
    return tuple(
        tuple(_moved(units, plan, representatives[first], index) for plan in measured[representatives[first]])
        for index, first in enumerate(units.classes)
    )


def _moved(units: Units, plan: UnitPlan, source: int, target: int) -> UnitPlan:
    return replace(plan, kept=units.translated(plan.kept, source, target))


def _measured(
    units: Units,
    everything: Simulation,
    tops: Sequence[tuple[int, int]],
    menus: Mapping[int, Sequence[frozenset[int]]],
) -> dict[int, tuple[UnitPlan, ...]]:
    """The plans of some units, without those that another one is as good as.

    A simulation measures one plan of each unit, while all other units save everything.

    Args:
        units: of a problem.
        everything: the simulation in which all saved activations are saved.
        tops: of that one.
        menus: what each plan keeps, for each unit that is measured.
    """
    problem = units.problem
    others = (units.leaving | problem.activations).difference(*(units.all[index].members for index in menus))
    base = _recompute_seconds(units, everything)
    found: dict[int, tuple[UnitPlan, ...]] = dict.fromkeys(menus, ())
    menus = {index: plans for index, plans in menus.items() if plans}
    for number in range(max(map(len, menus.values()), default=0)):
        kept = {index: plans[min(number, len(plans) - 1)] for index, plans in menus.items()}
        simulation = simulate(problem, problem.closure(others.union(*kept.values())))
        stashed = _stashed_more(units, everything, simulation, sorted(menus))
        seconds = _recompute_seconds(units, simulation)
        before = 0
        for index, (forward, backward) in enumerate(_tops(units, simulation)):
            if index in menus:
                plan = UnitPlan(
                    kept[index],
                    stashed[index],
                    forward - before - tops[index][0],
                    backward - before - tops[index][1],
                    seconds[index] - base[index],
                )
                found[index] = _with(found[index], plan)
                before += stashed[index]
    return found


def _with(plans: tuple[UnitPlan, ...], plan: UnitPlan) -> tuple[UnitPlan, ...]:
    if any(other.is_as_good_as(plan) for other in plans):
        return plans
    return (*(other for other in plans if not plan.is_as_good_as(other)), plan)


def _stashed_more(units: Units, everything: Simulation, found: Simulation, measured: Sequence[int]) -> dict[int, int]:
    """Bytes that each measured unit leaves for the backward, over those where everything is saved.

    What leaves a unit, and is saved since a measured one is recomputed from it, counts for that one; what several read
    (an attention mask), for its own.
    """
    problem = units.problem
    more = dict.fromkeys(measured, 0)
    for sign, nodes in ((1, found.saved - everything.saved), (-1, everything.saved - found.saved)):
        for node in nodes:
            index = units.index[node]
            behind = (one for one in measured if one >= index)
            reader = _only_reader(units, node) if node in units.leaving else None
            more[reader if reader in more else next(behind, measured[-1])] += sign * problem.bytes[node]
    return more


def _only_reader(units: Units, root: int) -> int | None:
    """The unit that alone reads what leaves another one; None where several do."""
    problem = units.problem
    found = set()
    todo = [root]
    while todo:
        for user in problem.users[todo.pop()]:
            if problem.is_view[user]:
                todo.append(user)
            elif user in units.index:
                found.add(units.index[user])
    found.discard(units.index[root])
    return found.pop() if len(found) == 1 else None


def _recompute_seconds(units: Units, found: Simulation) -> list[float]:
    """Of each unit."""
    seconds = [0.0] * len(units.all)
    for node in found.recomputed:
        if node in units.index:
            seconds[units.index[node]] += units.problem.seconds[node]
    return seconds


def _tops(units: Units, found: Simulation) -> tuple[tuple[int, int], ...]:
    """The highest bytes of each unit's part of the forward and of the backward."""
    forward = _forward_tops(units, found)
    backward = _backward_tops(units, found)
    return tuple((forward.get(index, 0), backward.get(index, 0)) for index in range(len(units.all)))


def _forward_tops(units: Units, found: Simulation) -> dict[int, int]:
    order = np.array(found.forward.order, dtype=np.intp)
    index = units.index_table[order]
    # What is in no unit runs within the one before it; what runs before all, within the first.
    last = np.maximum.accumulate(np.where(index < 0, 0, np.arange(len(order))))
    return _highest(np.maximum(index[last], 0), np.array(found.forward.held, dtype=np.int64))


def _backward_tops(units: Units, found: Simulation) -> dict[int, int]:
    """The parts of layers from the first to the last of their operators; of the others what lies between those."""
    order = np.array(found.backward.order, dtype=np.intp)
    held = np.array(found.backward.held, dtype=np.int64)
    index = units.layer_table[order]
    (steps,) = np.nonzero(index >= 0)
    layers, firsts = np.unique(index[steps], return_index=True)
    _, lasts = np.unique(index[steps][::-1], return_index=True)
    spans = sorted(zip(steps[firsts].tolist(), steps[::-1][lasts].tolist(), layers.tolist(), strict=True))
    tops = {layer: int(held[first : last + 1].max()) for first, last, layer in spans}
    before = -1
    behind = len(units.all) - 1
    for first, last, layer in [*spans, (len(held), len(held), -1)]:
        between = held[before + 1 : first]
        for other in range(layer + 1, behind + 1):
            if len(between) and not units.all[other].layer:
                tops[other] = max(tops.get(other, 0), int(between.max()))
        before, behind = max(before, last), layer - 1 if layer >= 0 else behind
    return tops


def _highest(keys: np.ndarray, held: np.ndarray) -> dict[int, int]:
    """The highest bytes by key."""
    tops = np.zeros(keys.max(initial=0) + 1, dtype=np.int64)
    np.maximum.at(tops, keys, held)
    return dict(enumerate(tops.tolist()))
