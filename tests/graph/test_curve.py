"""The place of plans on the curve of budgets: with the peak that is predicted of them."""

from dataclasses import replace

import pytest

from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.engines.compile.solver.plan import Infeasible, Plan, point_of, points_of, solved
from tests.captured import capture
from tests.graph.test_solve import IDS, Stack

OUTSIDE = Footprint(0, parameters=10_000, optimizer=20_000)


@pytest.fixture(scope="module")
def forward(roberta):
    return MultiGraphSolver([problem_of(roberta.graph, [1.0] * len(roberta.graph.joint.nodes))], (1,))


def place_of(roberta, forward, asked):
    nodes = [roberta.graph.joint.order[node] for node in roberta.choose(asked).nodes_to_save]
    problem = problem_of(roberta.graph, [1.0] * len(roberta.graph.joint.nodes))
    return point_of(forward.saving([problem.saving(nodes)]), OUTSIDE)


@pytest.mark.parametrize("asked", ["level 1", "level 2", "Gelu+:1:-1", "Gelu+:1:1,Dropout+:1:-1"])
def test_a_plan_has_the_peak_of_its_timeline(roberta, forward, asked):
    found = place_of(roberta, forward, asked)
    prediction = roberta.split(asked).graph.timeline.predict(roberta.sizes)
    assert found.peak == replace(OUTSIDE, activations=prediction.peak).peak
    assert 0 < found.extra_time < 1


def test_saving_everything_costs_nothing(roberta, forward):
    found = place_of(roberta, forward, "Gelu+:1:0")
    assert found.extra_seconds == 0 and found.seconds > 0


def test_a_budget_is_on_the_curve():
    stack = capture(Stack(2).forward, IDS, dynamic=False)
    forward = MultiGraphSolver([problem_of(stack.graph, [1.0] * len(stack.graph.joint.nodes))], (1,))
    low, _, high = points_of(solved(forward.lowest, forward.everything, forward.cheapest, count=3), OUTSIDE)
    assert low.peak < high.peak and low.extra_seconds > high.extra_seconds == 0
    between = point_of(forward.cheapest((forward.lowest + forward.everything) // 2), OUTSIDE)
    assert low.peak <= between.peak <= (low.peak + high.peak) // 2
    with pytest.raises(Infeasible):
        forward.cheapest(forward.lowest // 2)
    assert forward.cheapest(2 * forward.everything).extra_seconds == 0


def test_what_is_found_for_a_larger_budget_counts_for_a_smaller_one():
    slower, better = (
        Plan((), peak=150, extra_seconds=3.0, seconds=9.0),
        Plan((), peak=140, extra_seconds=2.0, seconds=9.0),
    )
    fastest = Plan((), peak=300, extra_seconds=0.0, seconds=9.0)
    plans = {100: Plan((), peak=90, extra_seconds=5.0, seconds=9.0), 200: slower, 300: better, 400: fastest}
    found = solved(100, 400, plans.__getitem__, count=4)
    assert found == [(100, plans[100]), (200, better), (300, fastest), (400, fastest)]
