"""The solver against every subset of a small layer, and its guarantees for any budget."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.costs.inlining import inlined
from optimum_memopt.engines.compile.graph.problem import Problem, problem_of
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.memory.simulation import held_at_peak, simulate
from optimum_memopt.engines.compile.memory.tape import Tape
from optimum_memopt.engines.compile.memory.tape_problem import problem_of_tape
from optimum_memopt.engines.compile.solver.blocks import blocks_of
from optimum_memopt.engines.compile.solver.dynamic_program import dynamic_programs
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.solver.solver import Infeasible, Plan, Solver, point_of, points_of, solved
from tests.captured import Captured, capture
from tests.rotation import nightly


class Block(torch.nn.Module):
    """A layer with few saved activations of different sizes."""

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
    """Has a different operator between each two layers, as DeBERTa has for its relative positions."""

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
    """Has a mask that all layers read, sums larger than their operands, and a head as large as logits."""

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


class BiasedBlock(Block):
    """Turns the mask into a bias, as torch does for its attention kernels."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2)
        bias = torch.where(mask, torch.full(scores.shape, 0.5), -0.5)
        return super().forward((scores * bias).softmax(-1) @ x)


class Biased(Masked):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.layers = torch.nn.ModuleList([BiasedBlock() for _ in range(count)])


IDS = torch.arange(4 * 12).view(4, 12) % 50


@pytest.fixture(scope="module")
def one_layer() -> Captured:
    return capture(Stack(1).forward, IDS, dynamic=False)


@pytest.fixture(scope="module")
def many_layers() -> Captured:
    return capture(Stack(5).forward, IDS, dynamic=False)


def priced(captured: Captured, seed: int) -> Problem:
    """Returns a problem with a random price for each kind of operator, unrelated to the bytes that it saves."""
    generator = random.Random(seed)
    kinds: dict[str, float] = {}
    nodes = captured.joint.nodes
    return problem_of(
        captured.graph, [kinds.setdefault(str(node.target), generator.uniform(0.1, 3)) * 1e-3 for node in nodes]
    )


def budgets(solver: Solver, count: int) -> list[int]:
    low, high = solver.lowest.peak, solver.everything.peak
    return [low + (high - low) * step // count for step in range(count + 1)]


@pytest.mark.parametrize("seed", nightly(range(4), but=[0]))
def test_no_subset_of_a_layer_is_more_than_a_hundredth_cheaper(one_layer: Captured, seed: int) -> None:
    problem = priced(one_layer, seed)
    leaving = blocks_of(problem).leaving
    free = sorted(problem.activations - leaving)
    assert 8 <= len(free) <= 13
    subsets = itertools.chain.from_iterable(itertools.combinations(free, count) for count in range(len(free) + 1))
    simulated = [simulate(problem, saved) for saved in {problem.closure(leaving.union(subset)) for subset in subsets}]
    solver = Solver(problem)
    # At the lowest peak itself, a plan may be 15% slower than the best one.
    for budget in budgets(solver, 12)[1:]:
        plan = solver.solve(budget)
        fitting = [solver.plan(subset).extra_seconds for subset in simulated if subset.peak <= budget]
        assert plan.peak <= budget
        assert not fitting or plan.extra_seconds <= min(fitting) * 1.01 + 1e-9


@pytest.mark.parametrize("name", nightly(["many_layers", "roberta", "albert"], but=["many_layers"]))
def test_a_smaller_budget_has_no_higher_peak_and_no_less_time(name: str, request: pytest.FixtureRequest) -> None:
    problem = priced(request.getfixturevalue(name), 0)
    solver = Solver(problem)
    ladder = budgets(solver, 12)
    plans = [solver.solve(budget) for budget in ladder]
    assert [plan.peak for plan in plans] == sorted(plan.peak for plan in plans)
    assert [plan.extra_seconds for plan in plans] == sorted((plan.extra_seconds for plan in plans), reverse=True)
    assert plans[-1].extra_seconds == 0
    for plan in plans:
        assert simulate(problem, frozenset(plan.saved)).peak == plan.peak
    # The plan is the same on another rank.
    assert Solver(priced(request.getfixturevalue(name), 0)).solve(ladder[4]) == plans[4]


def test_plans_of_several_budgets_are_as_good_as_those_of_each(one_layer: Captured) -> None:
    problem = priced(one_layer, 0)
    solver = Solver(problem)
    ladder = budgets(solver, 12)
    plans = solver.plans(reversed(ladder))
    assert len(plans) == len(ladder) and solver.plans([solver.lowest.peak // 2]) == ()
    for plan in plans:
        assert simulate(problem, frozenset(plan.saved)).peak == plan.peak
    # A single plan may be a fifth better or worse: neither search is complete.
    alone = sum(solver.solve(budget, is_final=False).extra_seconds for budget in ladder)
    assert sum(min(plan.extra_seconds for plan in plans if plan.peak <= budget) for budget in ladder) <= 1.05 * alone


def test_what_leaves_a_layer_counts_for_the_one_that_is_recomputed_from_it() -> None:
    problem = priced(capture(Spaced(5).forward, IDS, dynamic=False), 0)
    program, _ = dynamic_programs(blocks_of(problem))
    low, high = program.lowest().peak, program.everything.peak
    for budget in range(low, high, (high - low) // 8):
        # No plan's peak is far from the dynamic program's estimate.
        assert program.simulate(program.choose(budget)).peak <= budget * 1.01


@pytest.fixture(scope="module")
def masked() -> Problem:
    """Returns a problem in which products take a hundred times as long as all else."""
    captured = capture(Masked(4).forward, IDS, dynamic=False)
    kinds = [str(node.target) for node in captured.joint.nodes]
    return problem_of(captured.graph, [1e-3 if "mm" in kind else 1e-5 for kind in kinds])


def test_what_leaves_a_layer_is_recomputed_where_that_is_cheaper(masked: Problem) -> None:
    solver = Solver(masked)
    assert any(masked.boundaries.difference(solver.solve(budget).saved) for budget in budgets(solver, 8)[1:-1])


def test_no_kind_of_operator_alone_is_cheaper_to_recompute(masked: Problem) -> None:
    solver = Solver(masked)
    for kind in sorted({masked.kinds[node] for node in masked.activations}):
        kept = [node for node in masked.activations if masked.kinds[node] != kind]
        alone = solver.plan(simulate(masked, masked.closure(kept)))
        plan = solver.solve(alone.peak)
        assert plan.peak <= alone.peak and plan.extra_seconds <= alone.extra_seconds + 1e-9, kind


def test_a_fill_that_is_inlined_is_saved_by_no_plan() -> None:
    """An inlined fill is stored nowhere, and takes memory only if the forward returns it."""
    captured = capture(Biased(4).forward, IDS, dynamic=False)
    saved = {activation.root for activation in captured.activations}
    graph = replace(captured.graph, inlined=inlined(captured.graph.joint, captured.graph.size_hints, saved))
    problem = problem_of(graph, [1e-3 if "mm" in str(node.target) else 1e-5 for node in graph.joint.nodes])
    fills = {node for node, root in enumerate(problem.roots) if problem.is_view[node] and root == node}
    assert any(fills.intersection(problem.reads[node]) for node in problem.activations)
    solver = Solver(problem)
    for budget in budgets(solver, 8):
        assert not fills.intersection(solver.solve(budget).saved)


@pytest.fixture(scope="module")
def chain() -> Captured:
    """Returns eight layers with one operator each, and the gradients of their weights."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    return capture(lambda x: model(x).square().sum(), torch.randn(400, 16), dynamic=False)


@pytest.mark.parametrize("name, share", [("one_layer", 0.99), ("chain", 0.7), ("many_layers", 1)])
def test_the_lowest_peak_is_the_lowest_budget(name: str, share: float, request: pytest.FixtureRequest) -> None:
    """No smaller batch is advised than the one that fits, and every budget on the curve is feasible."""
    problem = priced(request.getfixturevalue(name), 1)
    solver = Solver(problem)
    lowest = solver.lowest.peak
    # Below the lowest peak of blocks, each of which is recomputed from the output of the previous one.
    programs = dynamic_programs(blocks_of(problem))
    assert lowest <= share * min(program.lowest().peak for program in programs)
    assert solver.solve(lowest).peak == lowest
    for budget in (1, lowest - 1, *(int(share * lowest) for share in (0.99, 0.97, 0.9, 0.8, 0.6, 0.3))):
        with pytest.raises(Infeasible) as refused:
            solver.solve(budget)
        assert refused.value.peak == lowest, budget
        assert refused.value.holds and sum(size for _, size in refused.value.holds) <= lowest


def test_identical_layers_are_solved_once(many_layers: Captured) -> None:
    blocks = blocks_of(priced(many_layers, 0))
    classes = [first for first, block in zip(blocks.classes, blocks.all, strict=True) if block.layer]
    assert len(classes) == 5 and len(set(classes)) <= 3


def test_what_is_held_at_the_peak_adds_up_to_it(many_layers: Captured) -> None:
    problem = priced(many_layers, 0)
    everything = Solver(problem).everything
    top = everything.backward.held.index(everything.backward.peak)
    workspace = problem.workspaces[everything.backward.order[top]]
    assert sum(held_at_peak(problem, everything, in_backward=True).values()) + workspace == everything.peak


OUTSIDE = Footprint(0, parameters=10_000, optimizer=20_000)


@pytest.mark.parametrize("asked", ["level 1", "level 2", "Gelu+:1:-1", "Gelu+:1:1,Dropout+:1:-1"])
def test_a_plan_has_the_peak_of_its_timeline(roberta, asked):
    problem = problem_of(roberta.graph, [1.0] * len(roberta.joint.nodes))
    nodes = [roberta.joint.order[node] for node in roberta.choose(asked).nodes_to_save]
    point = point_of(ForwardSolver(problem_of_tape(Tape.of_one(), [problem])).saving([problem.saving(nodes)]), OUTSIDE)
    prediction = roberta.split(asked).graph.timeline.predict(roberta.sizes)
    assert point.peak == replace(OUTSIDE, activations=prediction.peak).peak
    assert 0 < point.extra_time < 1


def test_a_budget_is_on_the_curve():
    stack = capture(Stack(2).forward, IDS, dynamic=False)
    solver = ForwardSolver(problem_of_tape(Tape.of_one(), [problem_of(stack.graph, [1.0] * len(stack.joint.nodes))]))
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
