"""The lengths of batches for which a run's cheaper plans are made. Pure.

One plan has to hold for the longest batch, and every shorter batch pays for it too. A plan for batches up to some
length recomputes less. What it takes is found while the plan for the longest batch is made: the same graph and the
same seconds of each operator, with the bytes of a shorter batch. A batch is taken to last as long as it has tokens.
"""

import bisect
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from optimum_memopt.engines.compile.graph.problem import Problem
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver

# Collators pad to multiples of it.
_MULTIPLE = 8
# Lengths that are compared, and those of them that are solved for.
_CANDIDATES = 32
_SOLVED = 6
# The share of a step's time that is worth compiling another forward.
WORTH = 0.005


@dataclass(frozen=True)
class ExtraByLength:
    """The extra time of plans for shorter batches.

    Attributes:
        batches: the longest row of each batch of an epoch; where they are not known, all lengths are as frequent.
        shares: extra time of the plan for each length, as a share of the time without; the last is the largest batch.
    """

    batches: Sequence[int] = ()
    is_known: bool = False
    shares: Mapping[int, float] = field(default_factory=dict)


def extra_by_length(
    batches: Sequence[int], longest: int, plan: Plan, problem_at: Callable[[int], Problem], allowed: int
) -> ExtraByLength:
    """The extra time of plans for shorter batches; `batches` as above, empty where they are not known."""
    rows = batches or range(min(_MULTIPLE, longest), longest + 1, _MULTIPLE)
    lengths = candidate_lengths(rows, longest)
    if plan.extra_seconds <= 0:
        return ExtraByLength(rows, bool(batches), dict.fromkeys(lengths, 0.0))
    shorter = _extra_seconds(problem_at, lengths[:-1], allowed, plan.extra_seconds)
    shares = (seconds / plan.seconds for seconds in (*shorter, plan.extra_seconds))
    return ExtraByLength(rows, bool(batches), dict(zip(lengths, shares, strict=True)))


def candidate_lengths(batches: Sequence[int], longest: int) -> tuple[int, ...]:
    """Lengths that a plan may be made for, ascending, `longest` among them."""
    rounded = sorted({-(-length // _MULTIPLE) * _MULTIPLE for length in batches})
    shorter = [length for length in rounded if length < longest]
    every = math.ceil(len(shorter) / _CANDIDATES) or 1
    return (*reversed(shorter[::-1][::every]), longest)


def _extra_seconds(
    problem_at: Callable[[int], Problem], lengths: Sequence[int], allowed: int, most: float
) -> tuple[float, ...]:
    """Seconds of recompute in the plan for each of some ascending lengths; `most` are those for a longer batch."""
    free = bisect.bisect_left(lengths, True, key=lambda length: Solver(problem_at(length)).everything.peak > allowed)
    rest = lengths[free:]
    every = math.ceil(len(rest) / _SOLVED) or 1
    extra: list[float] = []
    # A length that is not solved for has the plan of the next longer one.
    for index, length in enumerate(reversed(rest)):
        if index % every == 0:
            with contextlib.suppress(Infeasible):
                most = min(most, Solver(problem_at(length)).solve(allowed).extra_seconds)
        extra.append(most)
    return (*(0.0,) * free, *reversed(extra))


def expected_extra(batches: Mapping[int, int], shares: Mapping[int, float], chosen: Sequence[int]) -> float:
    """Extra time of an epoch as a share of its time; each of the batches, counted by length, runs under the plan for
    the shortest chosen length that is enough, or for the longest."""
    lengths = sorted(chosen)
    total, extra = 0, 0.0
    for length, count in batches.items():
        plan = lengths[min(bisect.bisect_left(lengths, length), len(lengths) - 1)]
        total += length * count
        extra += length * count * shares[plan]
    return extra / total if total else 0.0


def best_lengths(batches: Sequence[int], shares: Mapping[int, float], most: int) -> tuple[int, ...]:
    """The lengths below the largest for which cheaper plans save most of an epoch's time, ascending.

    Fewer than asked for where one more would not be worth compiling it.
    """
    counts = Counter(batches)
    *shorter, longest = sorted(shares)
    best: tuple[int, ...] = ()
    before = expected_extra(counts, shares, (longest,))
    for count in range(1, most + 1):
        chosen = itertools.combinations(shorter, count)
        options = ((expected_extra(counts, shares, (*lengths, longest)), lengths) for lengths in chosen)
        extra, lengths = min(options, default=(before, ()))
        if before - extra < WORTH:
            break
        best, before = lengths, extra
    return best
