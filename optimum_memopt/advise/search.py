"""Searches over micro-batches: what fits, what is fastest, and the smallest that is as good. Pure.

Samples a second rise with the micro-batch while launches and the optimizer's step are shared by more rows, and fall
where more has to be recomputed to fit. So they have one maximum, which a golden-section search finds with few looks.
"""

import math
from collections.abc import Callable, Sequence

_GOLDEN = (math.sqrt(5) - 1) / 2
# Rows of a micro-batch where no global batch limits them.
_MOST_ROWS = 2**15
# Smaller than the best by no more than this is as good.
AS_GOOD = 0.01


def micro_batches(rows: int | None) -> tuple[int, ...]:
    """Micro-batches to choose from, the smallest first.

    Args:
        rows: of a process and an optimizer step, of which they are the divisors; None: steps have one micro-batch,
            of a power of two or three times one.
    """
    if rows is None:
        doubled = [1]
        while doubled[-1] < _MOST_ROWS:
            doubled.append(2 * doubled[-1])
        return tuple(sorted({*doubled, *(3 * size // 2 for size in doubled[1:])}))
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    return tuple(sorted({*small, *(rows // size for size in small)}))


def count_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """How many of the smallest sizes fit, where each one fits if a larger one does."""
    low, high = 0, 1
    # Doubled, since what is far too large may take long to look at.
    while high <= len(sizes) and fits(sizes[high - 1]):
        low, high = high, 2 * high
    high = min(high, len(sizes) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(sizes[middle - 1]) else (low, middle)
    return low


def highest(count: int, value: Callable[[int], float]) -> int:
    """The index below `count` with the highest value, of values that rise up to it and fall behind it.

    Args:
        count: from 1 on.
        value: of an index; asked again for the same one.
    """
    low, high = 0, count - 1
    while high - low > 2:
        step = max(1, round((high - low) * (1 - _GOLDEN)))
        left, right = low + step, max(high - step, low + step + 1)
        if value(left) < value(right):
            low = left + 1
        else:
            high = right - 1
    return max(range(low, high + 1), key=value)


def smallest_as_good(best: int, value: Callable[[int], float], least: float) -> int:
    """The first index up to `best` whose value is at least `least`, where values rise up to `best`."""
    low, high = -1, best
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if value(middle) >= least else (middle, high)
    return high
