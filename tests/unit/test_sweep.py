"""`memopt plan --measure` with made-up measurements: which processes are started, what is shown, which run wins."""

import pytest

from optimum_memopt.errors import MemOptError
from optimum_memopt.measure.measure_case import Case, Measurement
from optimum_memopt.measure.sweep import sweep
from optimum_memopt.plans.table import PlanRow, PlanTable
from optimum_memopt.predict.workload import Workload

MIB = 2**20
SAVINGS = {"A+:1:-1": 100, "B+:1:-1": 50, "Bad+:1:-1": -80, "C+:1:-1,D+:1:-1": 30, "Tiny+:1:-1": 0}
CLAIMS = {"A+:1:-1": 200, "B+:1:-1": 150, "Bad+:1:-1": 120, "C+:1:-1,D+:1:-1": 40, "Tiny+:1:-1": 0.01}
LEVEL = ["A+:1:-1", "B+:1:-1", "C+:1:-1", "D+:1:-1", "Tiny+:1:-1"]
CASE = Case(Workload("folder", "fill-mask"), {"memory_opt_engine": "ort"})


class Machine:
    """Measures a case by arithmetic; `broken` plans raise an error, `layered` MiB are what only a level can save."""

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
    # A row that claims less than the noise of a peak is not worth a process.
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
    # Not once more as a row.
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
