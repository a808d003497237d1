"""benchmarks/budget.py: the meaning of its numbers, and a small run of its solver parts."""

from dataclasses import replace

import budget
import budget_cases
import budget_ragged
import budget_solver
import budget_steps
import pytest
import torch
from budget_baselines import Compared, checkpointed, compare
from budget_cases import Case, Measured
from budget_graphs import Shape, estimated, trace

from optimum_memopt.engines.compile.memory.simulation import GraphSimulation, simulate
from optimum_memopt.engines.compile.solver.solver import Solver

ONE = Measured(Case("llama", 4, 8, False, False, 0.5), 1000, 500, 1500, 990, 980, (600, 700, 900, 990), 1.0)


def test_the_table_counts_what_is_over_and_what_rises():
    over = replace(ONE, case=replace(ONE.case, bf16=True), peak=1000 + budget_cases.SLACK + 1)
    rises = replace(ONE, ladder=(600, 900, 700, 990))
    lines = {row["model"]: row for row in budget_cases.rows([ONE, over, rises])}
    assert (lines["all"]["cases"], lines["all"]["over budget"]) == (3, 1)
    assert lines["all"]["largest excess, bytes"] == budget_cases.SLACK + 1
    assert lines["all"]["peak rises as the budget falls"] == 1
    assert lines["all in fp32"]["of the budget used, median"] == "98.0%"
    assert lines["all in bf16"]["over budget"] == 1


def test_cases_are_the_same_everywhere_and_alternate():
    assert budget_cases.cases(30)[:12] == budget_cases.cases(12)
    assert {case.model for case in budget_cases.cases(10)} == set(budget_cases.MODELS)
    assert Measured.from_dict(ONE.to_dict()) == ONE


@pytest.mark.parametrize(("own", "solver", "ratio"), [(2.0, 1.0, 0.5), (0.0, 0.0, 1.0), (0.0, 1.0, float("inf"))])
def test_a_ratio_is_of_the_time_for_recompute(own: float, solver: float, ratio: float):
    assert Compared("level 1", 10, own, 9, solver).ratio == ratio


def test_gaps_are_shares_of_the_best():
    assert budget_solver.gap(1.01, 1.0) == pytest.approx(0.01)
    assert budget_solver.gap(0.0, 0.0) == 0
    assert budget_solver.gap(1.0, 0.0) == float("inf")


def test_ratios_of_steps_are_of_the_same_round():
    found = {"peaks": {"no plan": 4, "level 1": 2, "solver for level 1": 2}, "errors": {}}
    found["seconds"] = {"no plan": [1, 2, 4], "level 1": [2, 4, 6], "solver for level 1": [1, 3, 6]}
    _, level, solver = budget_steps.rows(found)
    assert (level["of no plan"], level["of the baseline"]) == (2, "")
    assert (solver["of no plan"], solver["of the baseline"]) == (1.5, 0.75)


def test_batches_are_padded_to_their_longest():
    lengths = [9, 30, 33, 17, 60, 12, 8, 40]
    random, grouped = (budget_ragged.padded_lengths(lengths, 4, order) for order in budget_ragged.ORDERS)
    assert sum(random.values()) == sum(grouped.values()) == 2
    assert max(random) == max(grouped) == 64


def test_extra_time_is_weighted_by_the_batches():
    one = {"budget": 15, "order": "random", "variants": [16], "lengths": {"8": (8, 0.1), "16": (15, 0.4)}}
    two = {**one, "variants": [8, 16], "lengths": {"8": (10, 0.0), "16": (15, 0.4)}}
    saved = {
        "plain": {"8": (10, 1.0), "16": (20, 2.0)},
        "plans": [one, two, two],
        "orders": {"random": {"8": 3, "16": 1}},
    }
    # The third plan is skipped, as it has no more variants than the second.
    rows = list(budget_ragged.rows(saved))
    assert [row["extra time"] for row in rows] == ["+14.0%", "+8.0%"]
    assert [row["plans for lengths up to"] for row in rows] == ["16", "8, 16"]


def test_checkpointing_recomputes_its_layers_and_the_solver_takes_no_longer():
    problem = trace(Shape("roberta", 2, 64, 64, 64), estimated, dtype=torch.float32)
    every, second = (simulate(problem, problem.closure(checkpointed(problem, count))) for count in (1, 2))
    solver = Solver(problem)

    def layers(found: GraphSimulation) -> set[str]:
        return {problem.layers[node] for node in found.recomputed if problem.seconds[node]}

    assert layers(every) == {layer for layer in problem.layers if layer}
    assert layers(second) == {min(layers(every))}
    assert every.saved_bytes < second.saved_bytes < solver.everything.saved_bytes
    compared = compare(solver, "checkpointing", checkpointed(problem, 1))
    assert compared.solver_peak <= compared.peak == every.peak < solver.everything.peak
    assert 0 < compared.ratio <= 1


def test_every_part_has_what_the_program_calls():
    assert all(callable(part.run) and callable(part.sections) for part in budget.PARTS.values())
