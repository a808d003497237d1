"""Finds the set of rows with the lowest measured peak. Pure: the caller measures a set.

Savings do not add up: one row's recompute may read what another row drops, or keep it alive. So the search measures
sets. It starts from sets that are known to be good (which hold rows that only help together), removes rows, then adds
rows, until changing any single row makes it no better.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

# `cluster_id:strategy:-1`, each; a row of the plan table has one, or several that only save together.
Rows = frozenset[str]
NOTHING: Rows = frozenset()

# Peaks of one case differ by about 0.1% between processes, times by a few percent.
PEAK_TOLERANCE = 0.005
TIME_TOLERANCE = 0.05


@dataclass(frozen=True)
class Outcome:
    """The measurement of a set of rows: peak (any unit, infinite when it failed) and seconds per step."""

    peak: float
    seconds: float


FAILED = Outcome(math.inf, math.inf)


@dataclass
class Search:
    """A search over sets of rows.

    Args:
        rows: what may be turned on, as rows of the plan table.
        measure: measures a set; called once for each.
        budget: most measurements that it may start.
        known: sets that are measured already.

    Attributes:
        known: every set measured so far.
        complete: False when the search ran out of budget.
    """

    rows: Sequence[Rows]
    measure: Callable[[Rows], Outcome]
    budget: int
    known: dict[Rows, Outcome] = field(default_factory=dict)
    complete: bool = True

    def run(self, starts: Iterable[Rows]) -> Rows:
        """The set with the lowest peak; of those that measure the same within `PEAK_TOLERANCE`, the fastest, and of
        those that are as fast within `TIME_TOLERANCE`, the smallest.

        Args:
            starts: sets to begin with, in addition to those in `known`.

        Raises:
            ValueError: no start, and nothing known.
        """
        for start in starts:
            self._outcome(start)
        if not self.known:
            raise ValueError("a search needs a set to start from")
        current = min(self.known, key=lambda rows: (self.known[rows].peak, self.known[rows].seconds))
        while True:
            before = current
            current = self._up(self._down(current))
            if current == before or not self.complete:
                return self._choose()

    def _down(self, current: Rows) -> Rows:
        """Remove each row that does not lower the peak, since its recompute takes time."""
        for row in self._least_helpful_first():
            fewer = without_row(current, row, self.rows)
            if fewer != current and self._outcome(fewer).peak <= self._lowest() * (1 + PEAK_TOLERANCE):
                current = fewer
        return current

    def _up(self, current: Rows) -> Rows:
        """Add each row that lowers the peak further."""
        for row in reversed(self._least_helpful_first()):
            more = with_row(current, row)
            if more != current and self._outcome(more).peak < self.known[current].peak * (1 - PEAK_TOLERANCE):
                current = more
        return current

    def _least_helpful_first(self) -> list[Rows]:
        alone = {row: self.known.get(row, FAILED).peak for row in self.rows}
        return sorted(self.rows, key=lambda row: (-alone[row], sorted(row)))

    def _lowest(self) -> float:
        return min(outcome.peak for outcome in self.known.values())

    def _outcome(self, rows: Rows) -> Outcome:
        if rows not in self.known:
            if self.budget <= 0:
                self.complete = False
                return FAILED
            self.budget -= 1
            self.known[rows] = self.measure(rows)
        return self.known[rows]

    def _choose(self) -> Rows:
        lowest = self._lowest() * (1 + PEAK_TOLERANCE)
        low = {rows: outcome for rows, outcome in self.known.items() if outcome.peak <= lowest}
        fastest = min(outcome.seconds for outcome in low.values()) * (1 + TIME_TOLERANCE)
        fast = {rows: outcome for rows, outcome in low.items() if outcome.seconds <= fastest}
        return min(fast, key=lambda rows: (len(rows), fast[rows].peak, sorted(rows)))


def with_row(current: Rows, row: Rows) -> Rows:
    """`current` with a row on; an id has one strategy, so the row's replaces another."""
    ids = {_cluster_id(part) for part in row}
    return frozenset(part for part in current if _cluster_id(part) not in ids) | row


def without_row(current: Rows, row: Rows, rows: Iterable[Rows]) -> Rows:
    """`current` with a row off, along with parts that only it needs; other rows that are on stay complete."""
    on = [other for other in rows if other <= current]
    return NOTHING.union(*(other for other in on if not row <= other)) if row in on else current


def _cluster_id(part: str) -> str:
    return part.split(":")[0]
