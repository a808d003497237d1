from dataclasses import replace

import pytest

from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.solver.multi_graph import MultiGraphSolver
from optimum_memopt.engines.compile.solver.plan import Infeasible, Plan, point_of, points_of, solved
from tests.captured import capture
from tests.graph.test_solve import IDS, Stack

OUTSIDE = Footprint(0, parameters=10_000, optimizer=20_000)


@pytest.mark.parametrize("asked", ["level 1", "level 2", "Gelu+:1:-1", "Gelu+:1:1,Dropout+:1:-1"])
def test_a_plan_has_the_peak_of_its_timeline(roberta, asked):
    problem = problem_of(roberta.graph, [1.0] * len(roberta.joint.nodes))
    nodes = [roberta.joint.order[node] for node in roberta.choose(asked).nodes_to_save]
    point = point_of(MultiGraphSolver([problem], (1,)).saving([problem.saving(nodes)]), OUTSIDE)
    prediction = roberta.split(asked).graph.timeline.predict(roberta.sizes)
    assert point.peak == replace(OUTSIDE, activations=prediction.peak).peak
    assert 0 < point.extra_time < 1


def test_a_budget_is_on_the_curve():
    stack = capture(Stack(2).forward, IDS, dynamic=False)
    solver = MultiGraphSolver([problem_of(stack.graph, [1.0] * len(stack.joint.nodes))], (1,))
    low, _, high = points_of(solved(solver.lowest, solver.everything, solver.cheapest, count=3), OUTSIDE)
    assert low.peak < high.peak and low.extra_seconds > high.extra_seconds == 0 < high.seconds
    between = point_of(solver.cheapest((solver.lowest + solver.everything) // 2), OUTSIDE)
    assert low.peak <= between.peak <= (low.peak + high.peak) // 2
    assert solver.cheapest(2 * solver.everything).extra_seconds == 0
    with pytest.raises(Infeasible):
        solver.cheapest(solver.lowest // 2)


def test_the_plan_of_a_larger_budget_counts_for_a_smaller_one():
    peaks = {100: (90, 5.0), 200: (150, 3.0), 300: (140, 2.0), 400: (300, 0.0)}
    plans = {budget: Plan((), peak, seconds, 9.0) for budget, (peak, seconds) in peaks.items()}
    curve = solved(100, 400, plans.__getitem__, count=4)
    assert curve == [(100, plans[100]), (200, plans[300]), (300, plans[400]), (400, plans[400])]
