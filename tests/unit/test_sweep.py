"""`memopt plan --measure` with made-up measurements: which processes start, what is shown, which run wins."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_memopt.errors import MemOptError
from optimum_memopt.measure import (
    FAILED,
    NOTHING,
    PEAK_TOLERANCE,
    TIME_TOLERANCE,
    Case,
    Measurement,
    Outcome,
    RowSearch,
    sweep,
    with_row,
    without_row,
)
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload

MIB = 2**20
SAVINGS = {"A+:1:-1": 100, "B+:1:-1": 50, "Bad+:1:-1": -80, "C+:1:-1,D+:1:-1": 30, "Tiny+:1:-1": 0}
CLAIMS = {"A+:1:-1": 200, "B+:1:-1": 150, "Bad+:1:-1": 120, "C+:1:-1,D+:1:-1": 40, "Tiny+:1:-1": 0.01}
LEVEL = ["A+:1:-1", "B+:1:-1", "C+:1:-1", "D+:1:-1", "Tiny+:1:-1"]
CASE = Case(Workload("folder", "fill-mask"), {"memory_opt_engine": "ort"})


class Machine:
    """Measures a case by arithmetic; `broken` plans raise, and only a level saves `layered` MiB more."""

    def __init__(self, broken=(), layered=0.0):
        self.broken, self.layered, self.cases = broken, layered, []

    def __call__(self, case):
        self.cases.append(case)
        config, level = case.options.get("memory_opt_config"), case.options.get("memory_opt_level", 0)
        asked = LEVEL if level else config.split(",") if config else []
        if any(part in self.broken for part in asked):
            raise MemOptError(f"ONNX Runtime fails on {config or level}")
        on = {row for row in SAVINGS if set(row.split(",")) <= set(asked)}
        plans = tuple(
            PlanRow(row, 2, round(CLAIMS[row] * MIB), "", requested_count=-(row in on), applied_count=2 * (row in on))
            for row in SAVINGS
        )
        peak = 1000 - sum(SAVINGS[row] for row in on) - (self.layered if level else 0)
        return Measurement(peak, 1 + 0.1 * len(on), 1.0, table=PlanTable("ort", plans))


def test_each_row_alone_the_levels_and_the_lowest():
    machine = Machine()
    names = []
    found = sweep(CASE, on_start=names.append, measure=machine)
    assert names[:7] == ["no plan", "level 1", "level 2", "A+:1:-1", "B+:1:-1", "Bad+:1:-1", "C+:1:-1,D+:1:-1"]
    assert found.complete
    assert found.winner.options == {"memory_opt_config": "A+:1:-1,B+:1:-1,C+:1:-1,D+:1:-1"}
    measured = {plan.config: plan.measured_saving_bytes for plan in found.table.plans}
    # A row whose claim is below the noise of a peak is not worth a process.
    assert measured == {row: None if row == "Tiny+:1:-1" else saving * MIB for row, saving in SAVINGS.items()}
    text = found.to_text()
    assert "Measured(Bytes)" in text and f"{-80 * MIB:,}" in text
    assert '--memory_opt_config "A+:1:-1,B+:1:-1,C+:1:-1,D+:1:-1"' in text
    assert "820.0 MiB, 0.82 of no plan" in text


def test_no_set_is_measured_twice():
    machine = Machine()
    sweep(CASE, measure=machine)
    options = [str(sorted(case.options.items())) for case in machine.cases]
    assert len(options) == len(set(options))


def test_a_plan_that_fails_is_shown_and_left_out():
    found = sweep(CASE, measure=Machine(broken=["B+:1:-1"]))
    assert "failed: B+:1:-1: ONNX Runtime fails on B+:1:-1" in found.to_text()
    assert "failed: level 1: ONNX Runtime fails on 1" in found.to_text()
    assert found.winner.options == {"memory_opt_config": "A+:1:-1,C+:1:-1,D+:1:-1"}
    assert next(case for case in found.to_dict()["cases"] if case["name"] == "level 1")["peak_mib"] is None


def test_no_baseline_is_an_error():
    def nothing_works(case):
        raise MemOptError("no such model")

    with pytest.raises(MemOptError, match="^no such model$"):
        sweep(CASE, measure=nothing_works)
    with pytest.raises(MemOptError, match="fails on B"):
        sweep(CASE, "B+:1:-1", measure=Machine(broken=["B+:1:-1"]))


def test_a_level_that_goes_lower_than_any_config_wins():
    assert sweep(CASE, measure=Machine(layered=100)).winner.name in ("level 1", "level 2")
    assert "--memory_opt_level" in sweep(CASE, measure=Machine(layered=100)).to_text()


def test_the_users_config_is_measured_too():
    found = sweep(CASE, "A+:1:-1", measure=Machine())
    assert [run.name for run in found.runs[:2]] == ["no plan", "config"]
    # It is not repeated as a row.
    assert "A+:1:-1" not in [run.name for run in found.runs]
    assert next(plan for plan in found.table.plans if plan.config == "A+:1:-1").measured_saving_bytes == 100 * MIB


@pytest.mark.parametrize("budget", [1, 2, 4, 8])
def test_no_more_processes_than_allowed(budget):
    machine = Machine()
    found = sweep(CASE, budget=budget, measure=machine)
    assert len(machine.cases) == budget
    assert not found.complete and "--max_runs" in found.to_text()


def test_no_plan_may_win():
    found = sweep(CASE, measure=Machine(broken=[*LEVEL, "A+:1:-1"]))
    assert found.winner.name == "no plan"
    assert found.to_text().endswith("no plan: none of them lowers the peak")


BASE = 1000.0


def row(*names: str) -> frozenset[str]:
    return frozenset(f"{name}+:1:-1" for name in names)


SINGLES = [row(name) for name in "ABCDEF"]
ALL = NOTHING.union(*SINGLES)


class Peaks:
    """Returns peaks by a formula, and records every requested set."""

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
    search = RowSearch(rows, machine, budget, {one: machine(one) for one in known})
    return search, search.run(starts)


@given(st.lists(st.integers(-6, 6).map(lambda tens: 10 * tens), min_size=6, max_size=6))
def test_savings_that_add_up_the_best_set_is_found(values):
    savings = dict(zip(SINGLES, values, strict=True))
    peak = additive(savings)
    _, found = run(Peaks(peak), SINGLES, [ALL])
    assert peak(found) <= (BASE - sum(value for value in values if value > 0)) * (1 + PEAK_TOLERANCE)
    # A row that saves nothing still costs time.
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
    machine = Peaks(peaks.__getitem__)
    search, found = run(machine, rows, [NOTHING.union(*rows)])
    assert search.complete
    near = [with_row(found, one) for one in rows] + [without_row(found, one, rows) for one in rows]
    for other in {*machine.asked, *near}:
        assert peaks[found] <= peaks[other] * (1 + PEAK_TOLERANCE) / (1 - PEAK_TOLERANCE)


@given(st.lists(st.integers(0, 100), min_size=6, max_size=6), st.integers())
def test_noise_costs_no_more_than_noise(values, seed):
    noise = PEAK_TOLERANCE / 4
    peak = additive(dict(zip(SINGLES, values, strict=True)))
    _, found = run(Peaks(peak, noise, seed), SINGLES, [ALL])
    assert peak(found) <= peak(ALL) * (1 + PEAK_TOLERANCE) * (1 + noise) / (1 - noise)


def test_rows_that_only_save_together_are_found_from_a_level():
    def peak(rows):
        return BASE - 300 * (row("A", "B", "C") <= rows) + 50 * (row("F") <= rows)

    _, found = run(Peaks(peak), SINGLES, [ALL])
    assert found == row("A", "B", "C")


def test_a_row_that_spoils_the_others_is_left_out():
    def peak(rows):
        return BASE if row("F") <= rows else additive(dict.fromkeys(SINGLES[:5], 100))(rows)

    _, found = run(Peaks(peak), SINGLES, [ALL])
    assert found == ALL - row("F")


def test_a_row_that_saves_nothing_alone_is_put_in_where_it_helps():
    def peak(rows):
        return BASE - 100 * (row("A") <= rows) - 100 * (row("A", "B") <= rows)

    _, found = run(Peaks(peak), SINGLES)
    assert found == row("A", "B")


def test_a_joint_row_goes_in_and_out_as_one():
    joint = row("Dropout", "Reshape")
    rows = [row("Dropout"), joint, row("A")]

    def peak(parts):
        assert row("Reshape") & parts == NOTHING or joint <= parts
        return BASE - 200 * (joint <= parts)

    assert run(Peaks(peak), rows, [NOTHING.union(*rows)])[1] == joint


def test_of_equal_peaks_the_faster_wins_and_of_equal_times_the_smaller():
    peaks = {NOTHING: 1000, row("A"): 500, row("B"): 500.0 * (1 + PEAK_TOLERANCE / 2), row("A", "B"): 500}
    seconds = {NOTHING: 1.0, row("A"): 2.0, row("B"): 1.5, row("A", "B"): 1.5 * (1 - TIME_TOLERANCE / 2)}
    known = {rows: Outcome(peaks[rows], seconds[rows]) for rows in peaks}
    assert RowSearch([row("A"), row("B")], known.__getitem__, 0, known).run([]) == row("B")


def test_sets_that_fail_are_never_chosen():
    def measure(rows):
        return FAILED if row("A") <= rows else Outcome(BASE - 10 * len(rows), 1.0)

    search = RowSearch(SINGLES, measure, 1000, {NOTHING: Outcome(BASE, 1.0)})
    found = search.run([ALL])
    assert not row("A") <= found and len(found) == 5


@given(st.integers(0, 12))
def test_the_budget_holds_and_is_told(budget):
    machine = Peaks(additive(dict.fromkeys(SINGLES, 50)))
    search = RowSearch(SINGLES, machine, budget, {NOTHING: Outcome(BASE, 1.0)})
    found = search.run([ALL])
    assert len(machine.asked) <= budget
    assert search.complete == (budget >= 7)
    assert found == (ALL if budget else NOTHING)


def test_one_strategy_for_an_id():
    assert with_row(frozenset({"A+:1:-1", "B+:1:-1"}), frozenset({"A+:2:-1"})) == {"A+:2:-1", "B+:1:-1"}
