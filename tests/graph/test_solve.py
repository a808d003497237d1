"""The solver against every subset of a small layer, and what it promises for any budget."""

import itertools
import random
import time
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.graph.problem import OtherGraphs, Problem, problem_of
from optimum_memopt.engines.compile.memory.simulation import held_at_peak, simulate
from optimum_memopt.engines.compile.solver.blocks import units_of
from optimum_memopt.engines.compile.solver.dynamic_program import TwoLevel, two_level
from optimum_memopt.engines.compile.solver.offload import is_within
from optimum_memopt.engines.compile.solver.solver import KEEPS_ALL, Floor, Solution, Solver
from tests.captured import Captured, capture
from tests.rotation import nightly


class Block(torch.nn.Module):
    """A layer of few saved activations of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x)
        weights = (inner @ inner.transpose(-1, -2)).softmax(-1)
        return x + self.down(functional.gelu(self.up(weights @ inner)).tanh().exp())


class Stack(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList([Block() for _ in range(count)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class ShiftedBlock(Block):
    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x * 1.5 + shift)


class Spaced(Stack):
    """With an operator between two layers, another one each time, as DeBERTa has for its relative positions."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.layers = torch.nn.ModuleList([ShiftedBlock() for _ in range(count)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.embedding.weight[: number + 1].exp().sum())
        return x.square().sum()


class MaskedBlock(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.where(mask, x @ x.transpose(-1, -2), -10.0)
        return x + self.down(functional.gelu(self.up(scores.softmax(-1) @ x)).half()).float()


class Masked(Stack):
    """With a mask that all layers read, sums of more bytes than what is added, and a head as large as logits."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.layers = torch.nn.ModuleList([MaskedBlock() for _ in range(count)])
        for layer in self.layers:
            layer.down.half()
        self.head = torch.nn.Linear(16, 600)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.embedding(ids), (ids[:, None] + ids[:, :, None]) % 3 > 0
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).exp().sum()


IDS = torch.arange(4 * 12).view(4, 12) % 50


@pytest.fixture(scope="module")
def one_layer() -> Captured:
    return capture(Stack(1).forward, IDS, dynamic=False)


@pytest.fixture(scope="module")
def many_layers() -> Captured:
    return capture(Stack(5).forward, IDS, dynamic=False)


def priced(captured: Captured, seed: int) -> Problem:
    """With a price for each kind of operator: what costs as much as it saves, and what does not."""
    generator = random.Random(seed)
    kinds: dict[str, float] = {}
    nodes = captured.joint.nodes
    return problem_of(
        captured.graph, [kinds.setdefault(str(node.target), generator.uniform(0.1, 3)) * 1e-3 for node in nodes]
    )


def budgets(problem: Problem, count: int) -> list[int]:
    high = simulate(problem, problem.closure(problem.activations)).peak
    floor = Solver(problem).solve(1)
    assert isinstance(floor, Floor)
    return [floor.peak + (high - floor.peak) * step // count for step in range(count + 1)]


@pytest.mark.parametrize("seed", nightly(range(4), but=[0]))
def test_no_subset_of_a_layer_is_more_than_a_hundredth_cheaper(one_layer: Captured, seed: int) -> None:
    problem = priced(one_layer, seed)
    units = units_of(problem)
    fixed = units.leaving & problem.activations
    free = sorted(problem.activations - fixed)
    assert 8 <= len(free) <= 13
    subsets = itertools.chain.from_iterable(itertools.combinations(free, count) for count in range(len(free) + 1))
    closures = {problem.closure(units.leaving.union(subset)) for subset in subsets}
    simulated = [simulate(problem, saved) for saved in closures]
    everything = simulate(problem, problem.closure(problem.activations)).extra_seconds(problem)
    solver = Solver(problem)
    # At the floor itself a plan may be 15% slower than the best.
    for budget in budgets(problem, 12)[1:]:
        found = solver.solve(budget)
        fitting = [one.extra_seconds(problem) - everything for one in simulated if one.peak <= budget]
        assert isinstance(found, Solution) and found.peak <= budget
        assert not fitting or found.extra_seconds <= min(fitting) * 1.01 + 1e-9


@pytest.mark.parametrize("name", nightly(["many_layers", "roberta", "albert"], but=["many_layers"]))
def test_a_smaller_budget_has_no_higher_peak_and_no_less_time(name: str, request: pytest.FixtureRequest) -> None:
    problem = priced(request.getfixturevalue(name), 0)
    begin, solver = time.process_time(), Solver(problem)
    found = [solver.solve(budget) for budget in budgets(problem, 12)]
    print(f"{name}: {len(found)} budgets in {time.process_time() - begin:.2f} CPU-s")
    assert all(isinstance(one, Solution) for one in found)
    assert [one.peak for one in found] == sorted(one.peak for one in found)
    assert [one.extra_seconds for one in found] == sorted((one.extra_seconds for one in found), reverse=True)
    assert found[-1].solver == KEEPS_ALL and found[-1].extra_seconds == 0
    for one in found:
        assert simulate(problem, frozenset(one.saved)).peak == one.peak


def test_plans_that_pass_the_budget_again_and_again_are_left_behind(
    many_layers: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units share what the dynamic program does not see, so that a plan may hold a little more than was asked for."""
    menus = two_level(priced(many_layers, 0))
    low, high = menus.lowest().peak, menus.everything.peak
    chosen = menus.choose((low + high) // 2)
    budget = simulate(menus.units.problem, menus.closure(chosen)).peak - 1
    original = TwoLevel.choose

    def choose(self: TwoLevel, asked: int) -> tuple[frozenset[int], ...]:
        return chosen if asked > budget - 50 else original(self, asked)

    monkeypatch.setattr(TwoLevel, "choose", choose)
    found = menus.solve(budget)
    assert found is not None and low <= found.peak <= budget


def test_what_leaves_a_layer_counts_for_the_one_that_is_recomputed_from_it() -> None:
    problem = priced(capture(Spaced(5).forward, IDS, dynamic=False), 0)
    menus = two_level(problem)
    low, high = menus.lowest().peak, menus.everything.peak
    for budget in range(low, high, (high - low) // 8):
        chosen = menus.choose(budget)
        assert chosen
        # No plan is far from where the dynamic program expects it.
        assert simulate(problem, menus.closure(chosen)).peak <= budget * 1.01


@pytest.fixture(scope="module")
def masked() -> Problem:
    """Where products take a hundred times as long as all else."""
    captured = capture(Masked(4).forward, IDS, dynamic=False)
    kinds = [str(node.target) for node in captured.joint.nodes]
    return problem_of(captured.graph, [1e-3 if "mm" in kind else 1e-5 for kind in kinds])


def test_what_leaves_a_layer_is_recomputed_where_that_is_cheaper(masked: Problem) -> None:
    menus, solver = two_level(masked), Solver(masked)
    low, high = menus.lowest().peak, menus.everything.peak
    cheaper = []
    for step in range(1, 8):
        budget = low + (high - low) * step // 8
        with_borders, without = menus.solve(budget), menus.without_borders.solve(budget)
        assert with_borders is not None
        if without is not None and without.extra_seconds(masked) < 0.99 * with_borders.extra_seconds(masked):
            assert without.peak <= budget
            found = solver.solve(budget)
            assert isinstance(found, Solution) and found.extra_seconds <= without.extra_seconds(masked)
            cheaper.append(without)
    assert any(masked.boundaries - found.saved for found in cheaper)


def test_no_kind_of_operator_alone_is_cheaper_to_recompute(masked: Problem) -> None:
    solver = Solver(masked)
    for kind in sorted({masked.kinds[node] for node in masked.activations}):
        kept = [node for node in masked.activations if masked.kinds[node] != kind]
        alone = simulate(masked, masked.closure(kept))
        found = solver.solve(alone.peak)
        assert isinstance(found, Solution) and found.peak <= alone.peak
        assert found.extra_seconds <= alone.extra_seconds(masked) + 1e-9, kind


def test_the_same_problem_has_the_same_solution(many_layers: Captured) -> None:
    first, second = (Solver(priced(many_layers, 1)).solve(budgets(priced(many_layers, 1), 3)[1]) for _ in range(2))
    assert isinstance(first, Solution) and isinstance(second, Solution)
    assert (first.saved, first.peak) == (second.saved, second.peak)


@pytest.fixture(scope="module")
def chain() -> Captured:
    """Eight layers of one operator each, and the gradients of their weights."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    return capture(lambda x: model(x).square().sum(), torch.randn(400, 16), dynamic=False)


@pytest.mark.parametrize("name", ["one_layer", "chain", "many_layers"])
def test_the_lowest_peak_is_the_lowest_budget(name: str, request: pytest.FixtureRequest) -> None:
    """So that no smaller batch is advised than what fits, and every budget on the curve can be had."""
    solver = Solver(priced(request.getfixturevalue(name), 1))
    floor = solver.lowest.peak
    found = solver.solve(floor)
    assert isinstance(found, Solution) and found.peak == floor
    assert is_within(solver, floor, None)
    for budget in (floor - 1, *(int(share * floor) for share in (0.99, 0.97, 0.9, 0.8, 0.6, 0.3))):
        refused = solver.solve(budget)
        assert isinstance(refused, Floor) and refused.peak == floor, budget
        assert not is_within(solver, budget, None)


@pytest.mark.parametrize("name, share", [("one_layer", 0.99), ("chain", 0.7)])
def test_the_lowest_peak_is_that_of_the_whole_graph(name: str, share: float, request: pytest.FixtureRequest) -> None:
    """Below that of units, each of which is recomputed from what leaves the one before."""
    problem = priced(request.getfixturevalue(name), 1)
    units = two_level(problem)
    assert Solver(problem).lowest.peak <= share * min(units.lowest().peak, units.without_borders.lowest().peak)


def test_a_graph_among_others_has_the_menus_of_the_graph_alone(many_layers: Captured) -> None:
    problem, others = priced(many_layers, 0), OtherGraphs(later=2000, gradients=1000, runs=2)
    budget = Solver(problem).everything.peak * 2
    among = Solver(problem).among(others)
    assert among.solve(budget) == Solver(replace(problem, others=others)).solve(budget)
    assert among.solve(budget) != Solver(problem).solve(budget)


def test_identical_layers_are_solved_once(many_layers: Captured) -> None:
    found = two_level(priced(many_layers, 0))
    layers = [index for index, unit in enumerate(found.units.all) if unit.layer]
    assert len(layers) == 5 and len({found.units.classes[index] for index in layers}) <= 3


def test_a_floor_names_what_holds_it(many_layers: Captured) -> None:
    problem = priced(many_layers, 0)
    floor = Solver(problem).solve(1)
    assert isinstance(floor, Floor) and isinstance(Solver(problem).solve(floor.peak), Solution)
    assert floor.holds and sum(size for _, size in floor.holds) <= floor.peak


def test_what_is_held_at_the_peak_adds_up_to_it(many_layers: Captured) -> None:
    problem = priced(many_layers, 0)
    found = simulate(problem, problem.closure(problem.activations))
    top = found.backward.held.index(found.backward.peak)
    workspace = problem.workspaces[found.backward.order[top]]
    assert sum(held_at_peak(problem, found, in_backward=True).values()) + workspace == found.peak
