"""The place of plans on the curve of budgets: with the peak that is predicted of them."""

from dataclasses import replace

import pytest

from optimum_memopt.engines.compile.budget.curve import point_of_budget, point_of_plan, points_of, solved
from optimum_memopt.engines.compile.budget.problem import problem_of
from optimum_memopt.engines.compile.budget.solve import Solver
from optimum_memopt.engines.compile.memory.footprint import Footprint

OUTSIDE = Footprint(0, parameters=10_000, optimizer=20_000)


@pytest.fixture(scope="module")
def solver(roberta):
    return Solver(problem_of(roberta.graph, [1.0] * len(roberta.graph.joint.nodes)))


@pytest.mark.parametrize("asked", ["level 1", "level 2", "Gelu+:1:-1", "Gelu+:1:1,Dropout+:1:-1"])
def test_a_plan_has_the_peak_of_its_timeline(roberta, solver, asked):
    nodes = roberta.choose(asked).nodes_to_save
    found = point_of_plan(solver, OUTSIDE, [roberta.graph.joint.order[node] for node in nodes])
    prediction = roberta.split(asked).graph.timeline.predict(roberta.sizes)
    assert found.peak == replace(OUTSIDE, activations=prediction.peak).peak
    assert 0 < found.extra_time < 1


def test_saving_everything_costs_nothing(roberta, solver):
    nodes = roberta.choose("Gelu+:1:0").nodes_to_save
    found = point_of_plan(solver, OUTSIDE, [roberta.graph.joint.order[node] for node in nodes])
    assert found.extra_seconds == 0 and found.seconds > 0


def test_a_budget_is_on_the_curve(solver):
    low, _, high = points_of(solved(solver, count=3), OUTSIDE)
    assert low.peak < high.peak and low.extra_seconds > high.extra_seconds == 0
    between = point_of_budget(solver, OUTSIDE, (low.budget + high.budget) // 2)
    assert low.peak <= between.peak <= (low.budget + high.budget) // 2
    assert point_of_budget(solver, OUTSIDE, low.peak - 1) is None
    assert point_of_budget(solver, OUTSIDE, 2 * high.budget).extra_seconds == 0
