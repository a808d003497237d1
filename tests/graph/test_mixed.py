"""Recompute with offload or compression under one budget: the plan against the partitioned graphs."""

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from budget_graphs import Within

from optimum_memopt.engines.compile.costs.costs import Costs, roofline
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph, decided_from
from optimum_memopt.engines.compile.graph.candidates import offloads
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.footprint import Footprint, StepContext
from optimum_memopt.engines.compile.memory.simulation import seconds_of, simulate
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.memory.tape_problem import problem_of_tape
from optimum_memopt.engines.compile.partition.captured_graph import no_costs
from optimum_memopt.engines.compile.partition.conversions import conversions_of
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.solver import compression
from optimum_memopt.engines.compile.solver.compression import Compression
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.solver.offload import Host, cheapest
from optimum_memopt.engines.compile.solver.solver import Infeasible, Solver
from optimum_memopt.engines.simulator.allocator import pinned_bytes
from optimum_memopt.engines.simulator.devices import DEVICES, Device
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.plans.grammar import Strategy
from tests.captured import Captured, capture
from tests.compiled import DROPOUT
from tests.model_zoo import ZOO
from tests.rotation import nightly

MIB = 2**20
# So slow that the link can move all saved activations during a forward.
SLOW = dataclasses.replace(
    DEVICES["RTX 4090"], bandwidth=1e9, flops={"float32": 1e9, "bfloat16": 1e9, "float16": 1e9}, link=1e9
)


@pytest.fixture(scope="module")
def larger() -> Captured:
    case = ZOO["roberta-classification"]
    model = case.build(**DROPOUT, hidden_size=128, intermediate_size=512, num_hidden_layers=3)
    return capture(model.forward, **case.batch(40, 60), dynamic=False)


def producer(budget: int, device: Device, link: float, host: int) -> Within:
    def costs(graph: AnalyzedGraph) -> Costs:
        return roofline(graph.joint, graph.size_hints, device, fused=False)

    return Within(budget, costs, StepContext(budget, Footprint(0, 0), link=link, host=host))


@pytest.fixture(scope="module")
def planned(larger: Captured) -> Callable[..., PartitionedGraph]:
    def found(budget: int, device: Device = SLOW, link: float | None = None, host: int = 2**40) -> PartitionedGraph:
        made = producer(budget, device, device.link if link is None else link, host)
        return larger.partitioned(made, device)[0]

    return found


@pytest.fixture(scope="module")
def solver(larger: Captured) -> Solver:
    seconds = roofline(larger.joint, larger.sizes, SLOW, fused=False).seconds
    return Solver(problem_of(larger.graph, seconds))


@pytest.fixture(scope="module")
def host(larger: Captured) -> Host:
    joint, candidates = larger.graph.joint, offloads(larger.graph.candidates)
    return Host(SLOW.link, 2**40, frozenset(joint.order[candidate.activation.root] for candidate in candidates))


def between(solver: Solver, share: float) -> int:
    low, high = solver.lowest.peak, solver.everything.peak
    return int(low * 1.02 + share * (high - low))


@pytest.mark.parametrize("share", nightly([0.1, 0.4], but=[0.4]))
def test_the_plan_is_within_the_budget_and_faster(share: float, planned, solver: Solver, host: Host) -> None:
    budget = between(solver, share)
    plan = cheapest(solver, budget, host)
    assert plan.offloaded and plan.peak <= budget
    assert plan.extra_seconds < cheapest(solver, budget, None).extra_seconds
    graph = planned(budget)
    offloaded = {c.activation.root.name for c in graph.choice.candidates if c.strategy is Strategy.OFFLOAD}
    assert offloaded == {solver.problem.names[node] for node in plan.offloaded}
    # Copies are on the host and take no device memory between forward and backward.
    assert graph.prediction.peak <= budget and "of the host for offload" in graph.choice.why


def test_what_recompute_cannot_fit(planned, solver: Solver, host: Host) -> None:
    budget = int(solver.lowest.peak * 0.9)
    with pytest.raises(DoesNotFitError):
        planned(budget, link=0.0)
    assert planned(budget).prediction.peak <= budget
    assert cheapest(solver, budget, host).offloaded


def test_offload_is_used_where_it_is_worth_it_and_there_is_room(solver: Solver, host: Host) -> None:
    budget = between(solver, 0.5)
    # So slow a link that the step waits for every copy.
    slow_link, no_room = dataclasses.replace(host, bandwidth=1e3), dataclasses.replace(host, available=MIB)
    assert not cheapest(solver, budget, slow_link).offloaded and not cheapest(solver, budget, no_room).offloaded
    plan = cheapest(solver, budget, host)
    assert plan.host_bytes == sum(pinned_bytes(solver.problem.bytes[node]) for node in plan.offloaded)
    assert cheapest(solver, budget, dataclasses.replace(host, available=plan.host_bytes)) == plan
    assert not cheapest(solver, solver.everything.peak, host).offloaded


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_offload_is_not_given_up_where_the_device_waits_for_most_of_it(share, solver: Solver, host: Host) -> None:
    budget = int(share * solver.lowest.peak)
    fast, slow = (cheapest(solver, budget, dataclasses.replace(host, bandwidth=each)) for each in (SLOW.link, 1e3))
    assert slow.offloaded and slow.peak <= budget and slow.extra_seconds > fast.extra_seconds


@pytest.mark.nightly
def test_two_graphs_hold_less_on_the_device_with_a_host(solver: Solver, host: Host) -> None:
    forward = problem_of_tape(Tape((Call(0), Call(0))), [solver.problem] * 2)
    twice = ForwardSolver(forward)
    plan = twice.cheapest((solver.everything.peak + twice.everything) // 2)
    assert solver.everything.peak < plan.peak < twice.everything
    assert plan.extra_seconds > 0 == plan.host_bytes
    allowed = frozenset(node for node, (_, local) in enumerate(forward.places) if local in host.allowed)
    offloading = ForwardSolver(forward, dataclasses.replace(host, allowed=allowed))
    budget = int(0.9 * twice.lowest)
    assert not twice.fits(budget) and offloading.fits(budget)
    with pytest.raises(Infeasible):
        twice.cheapest(budget)
    plan = offloading.cheapest(budget)
    assert plan.peak <= budget and plan.host_bytes > 0


# A device with slow products and fast memory; and one with fast products and slow memory.
FEW_FLOPS = dataclasses.replace(SLOW, bandwidth=1e12)
SLOW_MEMORY = dataclasses.replace(SLOW, bandwidth=1e6, flops=DEVICES["H100"].flops)


def forward_solver(captured: Captured, device: Device, is_allowed: bool = True) -> ForwardSolver:
    def costs(graph: AnalyzedGraph) -> Costs:
        return roofline(graph.joint, graph.size_hints, device, fused=False)

    graph = captured.graph
    problem, conversions = problem_of(graph, costs(graph).seconds), conversions_of(graph, costs)
    one = Tape((Call(0),))
    compressible = problem_of_tape(one, [conversions.added_to(problem, graph.size_hints)])
    allowed = Compression(compressible, [conversions.deciding]) if is_allowed else None
    return ForwardSolver(problem_of_tape(one, [problem]), compression=allowed)


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_fp8_is_chosen_where_it_takes_less_time_than_recompute(share: float, larger: Captured) -> None:
    mixed, exact = forward_solver(larger, FEW_FLOPS), forward_solver(larger, FEW_FLOPS, is_allowed=False)
    budget = between(mixed.solver, share)
    plan, recompute = mixed.cheapest(budget), exact.cheapest(budget)
    assert plan.compressed and plan.peak <= budget and not recompute.compressed
    assert plan.extra_seconds < recompute.extra_seconds
    problem = mixed.compression.forward.problem
    saved, compressed = frozenset(plan.saved), frozenset(plan.compressed)
    simulation = simulate(problem, saved, compressed)
    assert simulation.peak == plan.peak < simulate(problem, saved).peak
    seconds = simulation.seconds(problem) - plan.seconds
    assert seconds == pytest.approx(plan.extra_seconds) and seconds > seconds_of(problem, simulation.recomputed)
    # No compressed activation is needless.
    assert all(simulate(problem, saved, compressed - {node}).peak > budget for node in compressed)


def test_fp8_is_left_alone_where_recompute_takes_less_time(larger: Captured) -> None:
    mixed, exact = forward_solver(larger, SLOW_MEMORY), forward_solver(larger, SLOW_MEMORY, is_allowed=False)
    for share in (0.1, 0.4, 1.1):
        budget = between(mixed.solver, share)
        assert mixed.cheapest(budget) == exact.cheapest(budget)


def test_what_integers_are_recomputed_from_is_never_in_fp8() -> None:
    """The problem's numbers and the graph agree on the activations that integers are recomputed from."""
    weight = torch.nn.Parameter(torch.randn(64, 64))

    def routed(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x @ weight)
        chosen = torch.sigmoid(hidden).topk(4, -1).indices
        return hidden.gather(-1, chosen).sum() * torch.tanh(hidden).sum()

    captured = capture(routed, torch.randn(32, 64), dynamic=False)
    graph = captured.graph
    problem, conversions = problem_of(graph, no_costs(graph).seconds), conversions_of(graph, no_costs)
    generator, found = random.Random(0), set()
    roots = [node for node in range(len(problem.names)) if problem.is_forward[node] and problem.is_operator[node]]
    for _ in range(20):
        saved = problem.closure({node for node in roots if generator.random() < 0.5})
        expected = decided_from(graph, {graph.joint.nodes[node] for node in saved})
        numbers = compression.decided_from(problem, conversions.deciding, saved)
        assert numbers == {graph.joint.order[node] for node in expected}
        found |= numbers
    assert found
