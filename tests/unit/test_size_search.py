"""The search over rows, on memories whose best set is known."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.measure.sweep import (
    FAILED,
    NOTHING,
    PEAK_TOLERANCE,
    TIME_TOLERANCE,
    Outcome,
    Search,
    with_row,
    without_row,
)

BASE = 1000.0


def row(*names: str) -> frozenset[str]:
    return frozenset(f"{name}+:1:-1" for name in names)


SINGLES = [row(name) for name in "ABCDEF"]
ALL = NOTHING.union(*SINGLES)


class Machine:
    """Peaks by a formula, and every set that was asked for."""

    def __init__(self, peak, noise=0.0, seed=0):
        self.peak, self.noise, self.asked = peak, noise, []
        self._random = random.Random(seed)

    def __call__(self, rows):
        assert rows not in self.asked, "measured twice"
        self.asked.append(rows)
        factor = 1 + self._random.uniform(-self.noise, self.noise)
        return Outcome(self.peak(rows) * factor, 1 + 0.1 * len(rows))


def additive(savings):
    return lambda rows: BASE - sum(saving for single, saving in savings.items() if single <= rows)


def run(machine, rows, starts=(), budget=1000, singles=True):
    known = [NOTHING, *(rows if singles else ())]
    search = Search(rows, machine, budget, {one: machine(one) for one in known})
    return search, search.run(starts)


@given(st.lists(st.integers(-6, 6).map(lambda tens: 10 * tens), min_size=6, max_size=6))
def test_savings_that_add_up_the_best_set_is_found(values):
    savings = dict(zip(SINGLES, values, strict=True))
    peak = additive(savings)
    _, found = run(Machine(peak), SINGLES, [ALL])
    assert peak(found) <= (BASE - sum(value for value in values if value > 0)) * (1 + PEAK_TOLERANCE)
    # What saves nothing costs time all the same.
    assert not any(savings[single] <= 0 for single in SINGLES if single <= found)


@st.composite
def memories(draw):
    peaks = draw(st.lists(st.floats(500, 1500), min_size=16, max_size=16))
    rows = SINGLES[:4]
    sets = [NOTHING.union(*some) for count in range(5) for some in itertools.combinations(rows, count)]
    return rows, dict(zip(sets, peaks, strict=True))


@given(memories())
def test_never_above_anything_measured_nor_above_a_set_one_row_away(memory):
    rows, peaks = memory
    machine = Machine(peaks.__getitem__)
    search, found = run(machine, rows, [NOTHING.union(*rows)])
    assert search.complete
    near = [with_row(found, one) for one in rows] + [without_row(found, one, rows) for one in rows]
    for other in {*machine.asked, *near}:
        assert peaks[found] <= peaks[other] * (1 + PEAK_TOLERANCE) / (1 - PEAK_TOLERANCE)


@given(st.lists(st.integers(0, 100), min_size=6, max_size=6), st.integers())
def test_noise_costs_no_more_than_noise(values, seed):
    noise = PEAK_TOLERANCE / 4
    peak = additive(dict(zip(SINGLES, values, strict=True)))
    _, found = run(Machine(peak, noise, seed), SINGLES, [ALL])
    assert peak(found) <= peak(ALL) * (1 + PEAK_TOLERANCE) * (1 + noise) / (1 - noise)


def test_rows_that_only_save_together_are_found_from_a_level():
    def peak(rows):
        return BASE - 300 * (row("A", "B", "C") <= rows) + 50 * (row("F") <= rows)

    _, found = run(Machine(peak), SINGLES, [ALL])
    assert found == row("A", "B", "C")


def test_a_row_that_spoils_the_others_is_left_out():
    def peak(rows):
        return BASE if row("F") <= rows else additive(dict.fromkeys(SINGLES[:5], 100))(rows)

    _, found = run(Machine(peak), SINGLES, [ALL])
    assert found == ALL - row("F")


def test_a_row_that_saves_nothing_alone_is_put_in_where_it_helps():
    def peak(rows):
        return BASE - 100 * (row("A") <= rows) - 100 * (row("A", "B") <= rows)

    _, found = run(Machine(peak), SINGLES)
    assert found == row("A", "B")


def test_a_joint_row_goes_in_and_out_as_one():
    joint = row("Dropout", "Reshape")
    rows = [row("Dropout"), joint, row("A")]

    def peak(parts):
        assert row("Reshape") & parts == NOTHING or joint <= parts
        return BASE - 200 * (joint <= parts)

    assert run(Machine(peak), rows, [NOTHING.union(*rows)])[1] == joint


def test_of_equal_peaks_the_faster_wins_and_of_equal_times_the_smaller():
    peaks = {NOTHING: 1000, row("A"): 500, row("B"): 500.0 * (1 + PEAK_TOLERANCE / 2), row("A", "B"): 500}
    seconds = {NOTHING: 1.0, row("A"): 2.0, row("B"): 1.5, row("A", "B"): 1.5 * (1 - TIME_TOLERANCE / 2)}
    known = {rows: Outcome(peaks[rows], seconds[rows]) for rows in peaks}
    assert Search([row("A"), row("B")], known.__getitem__, 0, known).run([]) == row("B")


def test_sets_that_fail_are_never_chosen():
    def measure(rows):
        return FAILED if row("A") <= rows else Outcome(BASE - 10 * len(rows), 1.0)

    search = Search(SINGLES, measure, 1000, {NOTHING: Outcome(BASE, 1.0)})
    found = search.run([ALL])
    assert not row("A") <= found and len(found) == 5


@given(st.integers(0, 12))
def test_the_budget_holds_and_is_told(budget):
    machine = Machine(additive(dict.fromkeys(SINGLES, 50)))
    search = Search(SINGLES, machine, budget, {NOTHING: Outcome(BASE, 1.0)})
    found = search.run([ALL])
    assert len(machine.asked) <= budget
    assert search.complete == (budget >= 7)
    assert found == (ALL if budget else NOTHING)


def test_one_strategy_for_an_id():
    assert with_row(frozenset({"A+:1:-1", "B+:1:-1"}), frozenset({"A+:2:-1"})) == {"A+:2:-1", "B+:1:-1"}


def test_nothing_to_choose_from():
    with pytest.raises(ValueError, match="start"):
        Search([], lambda rows: FAILED, 5).run([])
