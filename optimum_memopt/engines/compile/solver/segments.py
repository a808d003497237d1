"""Recomputes segments of layers: the layers' inputs are recomputed too, from the input of a segment's first layer.
Pure.

A chain of n layers, each saving its input, holds n inputs at its peak; in segments of k it holds about n/k + k, at the
cost of one more forward of each layer whose result is not held (Chen et al. 2016, https://arxiv.org/abs/1604.06174).
No other byte costs as much time, so segments are for budgets that nothing else fits.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.graph_events import GraphEvents
from optimum_memopt.engines.compile.memory.simulation import problem_events
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.memory.tape_problem import TapeProblem

# Numbers of layers in a segment that are tried.
_SIZES = (2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True)
class Link:
    """An argument of a run that an earlier run, `source`, has returned, and that only the backward of `run` needs
    later."""

    run: int
    place: int
    source: int


@dataclass(frozen=True)
class Segments:
    """A set of links to recompute.

    Attributes:
        peak: peak of the forward and backward in bytes.
        seconds: extra seconds of the re-run runs, and of the gathers of their parameters.
    """

    links: tuple[Link, ...]
    peak: int
    seconds: float


def links_of(tape: Tape, runs: Sequence[GraphEvents], writes: Sequence[bool]) -> tuple[Link, ...]:
    """Returns the links of a forward whose source is a layer that can run again: it neither writes to its arguments
    nor returns one of them.

    Args:
        writes: for each run, True if it writes to its arguments.
    """
    readers = Counter(number for call, events in zip(tape.calls, runs, strict=True) for number in _read(call, events))
    readers.update(tensor.storage for operator in tape.outside for tensor in operator.saved)
    released = {number for call in tape.calls for number in call.released}
    returned: dict[int, int] = {}
    links: list[Link] = []
    for index, (call, events) in enumerate(zip(tape.calls, runs, strict=True)):
        saved = ((at, call.inputs[at]) for at in events.inputs if at in call.inputs and _is_saved(events, at))
        links += [
            Link(index, place, returned[number])
            for place, number in saved
            if number in returned and number in released and readers[number] == 1
        ]
        if call.layer and not writes[index] and set(call.inputs.values()).isdisjoint(call.outputs.values()):
            returned.update(dict.fromkeys(call.outputs.values(), index))
    return tuple(links)


def _is_saved(events: GraphEvents, place: int) -> bool:
    return events.inputs[place].name in events.saved_inputs


def _read(call: Call, events: GraphEvents) -> set[int]:
    """Returns the storages passed between runs that this run's backward reads."""
    saved = {storage.name for storage in events.saved}
    inputs = {call.inputs[place] for place in events.inputs if place in call.inputs and _is_saved(events, place)}
    returned = (call.outputs.get(place) for place, name in events.outputs if place is not None and name in saved)
    return inputs | {number for number in returned if number is not None}


def segments_within(
    forward: TapeProblem, saved: Sequence[frozenset[int]], allowed: int, fixed: Collection[Link], gather_rate: float
) -> Segments | None:
    """Returns the fastest segments whose peak fits, else those with the lowest peak; None if there are no links, or
    not all of `fixed`.

    Args:
        saved: nodes that each run saves, by the numbers of its own problem.
        allowed: bytes that the forward and backward may hold.
        fixed: links to take; empty: any.
        gather_rate: see `StepContext`.
    """
    runs = [problem_events(problem, nodes) for problem, nodes in zip(forward.runs, saved, strict=True)]
    links = links_of(forward.tape, runs, [problem.writes for problem in forward.runs])

    def of(chosen: tuple[Link, ...]) -> Segments:
        tape = with_recomputed(forward.tape, chosen)
        peak = compose(tape, runs, forward.frees_gradients).peak()
        return Segments(chosen, peak, seconds_again(forward, tape, gather_rate))

    if fixed or not links:
        return of(tuple(fixed)) if fixed and set(fixed) <= set(links) else None
    places = _places(links)

    def segments(size: int) -> Segments:
        """Returns the links inside segments of this size: as many of the first ones as it takes to fit, or to reach
        their lowest peak."""
        inner = tuple(link for link, place in zip(links, places, strict=True) if place % size)
        first = cache(lambda count: of(inner[:count]))
        most, counts = len(inner), range(len(inner))
        if first(most).peak > allowed:
            # Links lower the peak until it is that of a segment that runs again; later links may only raise it.
            most = bisect.bisect_left(counts, True, key=lambda count: first(count).peak <= first(count + 1).peak)
        return first(bisect.bisect_left(counts, True, hi=most, key=lambda count: first(count).peak <= allowed))

    found = [segments(size) for size in _SIZES if size <= len(links) + 1]
    fitting = [each for each in found if each.peak <= allowed]
    if fitting:
        return min(fitting, key=lambda each: (each.seconds, each.peak))
    return min(found, key=lambda each: each.peak)


def _places(links: Iterable[Link]) -> list[int]:
    """Returns the position of each link in its chain, starting at 1."""
    places: dict[int, int] = {}
    for link in links:
        places[link.run] = places.get(link.source, 0) + 1
    return [places[link.run] for link in links]


def with_recomputed(tape: Tape, links: Iterable[Link]) -> Tape:
    """Returns the tape of a forward that recomputes these links."""
    places: dict[int, set[int]] = {}
    for link in links:
        places.setdefault(link.run, set()).add(link.place)
    calls = (replace(call, recomputed=frozenset(places.get(index, ()))) for index, call in enumerate(tape.calls))
    return replace(tape, calls=tuple(calls))


def seconds_again(forward: TapeProblem, tape: Tape, gather_rate: float) -> float:
    """Returns the seconds of the runs that the tape runs again, and of the gathers of their parameters, which overlap
    with nothing; `gather_rate` as in `StepContext`."""
    repeated = itertools.compress(forward.runs, tape.repeated)
    seconds = math.fsum(math.fsum(itertools.compress(run.seconds, run.is_forward)) for run in repeated)
    if not seconds or not gather_rate:
        return seconds
    return seconds + (tape.moved[0] - tape.with_all_held().moved[0]) / gather_rate
