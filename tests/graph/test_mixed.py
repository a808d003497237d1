"""Recompute and offload under one budget: the plan against the graphs that it is partitioned into."""

import dataclasses
from collections.abc import Callable

import pytest
from budget_graphs import Within

from optimum_memopt.engines.compile.costs.costs import Costs, roofline
from optimum_memopt.engines.compile.costs.devices import DEVICES, Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.candidates import offloads
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.allocator import pinned_bytes
from optimum_memopt.engines.compile.memory.footprint import Footprint, StepContext
from optimum_memopt.engines.compile.memory.tape import Call, Tape
from optimum_memopt.engines.compile.memory.tape_problem import problem_of_tape
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.compile.solver.offload import Host, cheapest
from optimum_memopt.engines.compile.solver.solver import Infeasible, Solver
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.plans.grammar import Strategy
from tests.captured import Captured, capture
from tests.compiled import DROPOUT
from tests.model_zoo import ZOO

MIB = 2**20
# So slow that the link moves all saved activations during a forward.
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


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_the_plan_is_within_the_budget_and_faster(share: float, planned, solver: Solver, host: Host) -> None:
    budget = between(solver, share)
    plan = cheapest(solver, budget, host)
    assert plan.offloaded and plan.peak <= budget
    assert plan.extra_seconds < cheapest(solver, budget, None).extra_seconds
    graph = planned(budget)
    offloaded = {c.activation.root.name for c in graph.choice.candidates if c.strategy is Strategy.OFFLOAD}
    assert offloaded == {solver.problem.names[node] for node in plan.offloaded}
    # Copies are on the host, and take nothing of the device between forward and backward.
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
