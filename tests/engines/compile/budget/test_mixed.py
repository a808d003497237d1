"""Recompute and offload under one budget: the plan against the graphs that it is partitioned into."""

import dataclasses
from collections.abc import Callable

import pytest

from optimum_memopt.engines.compile.costs.costs import roofline
from optimum_memopt.engines.compile.costs.devices import DEVICES, Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.memory.allocator import pinned_bytes
from optimum_memopt.engines.compile.memory.footprint import Footprint
from optimum_memopt.engines.compile.partition import partitioned_graph
from optimum_memopt.engines.compile.partition.partitioned_graph import PartitionedGraph
from optimum_memopt.engines.compile.partition.producers.budget import FromBudget
from optimum_memopt.engines.compile.solver.multi_graph import Together
from optimum_memopt.engines.compile.solver.offload import host_of
from optimum_memopt.engines.compile.solver.solver import Floor
from optimum_memopt.engines.compile.train.step_context import Step
from optimum_memopt.errors import DoesNotFitError
from optimum_memopt.plans.grammar import Strategy
from optimum_memopt.sizes import Budget
from tests.engines.compile.captured import Captured, capture
from tests.engines.compile.compiled import DROPOUT
from tests.model_zoo import ZOO

MIB = 2**20
# So slow that the link moves all saved activations during a forward.
SLOW = dataclasses.replace(
    DEVICES["RTX 4090"], bandwidth=1e9, flops={"float32": 1e9, "bfloat16": 1e9, "float16": 1e9}, link=1e9
)
# So slow a link that the step waits for every copy.
NO_LINK = dataclasses.replace(SLOW, link=1e3)


@pytest.fixture(scope="module")
def larger() -> Captured:
    """Activations of a MiB and more."""
    case = ZOO["roberta-classification"]
    model = case.build(**DROPOUT, hidden_size=128, intermediate_size=512, num_hidden_layers=3)
    return capture(model.forward, **case.batch(40, 60), dynamic=False)


def producer(budget: int, device: Device, link: float, host: int) -> FromBudget:
    def step(_: Budget) -> Step:
        return Step(budget, Footprint(0, 0), link=link, host=host)

    def costs(graph: AnalyzedGraph) -> object:
        return roofline(graph.joint, graph.size_hints, device, fused=False)

    return FromBudget(Budget(f"{budget} bytes", budget), step=step, costs=costs)


@pytest.fixture(scope="module")
def planned(larger: Captured) -> Callable[..., PartitionedGraph]:
    def found(budget: int, device: Device = SLOW, link: float | None = None, host: int = 2**40) -> PartitionedGraph:
        others = (larger.inputs, larger.num_fwd_outputs, larger.others)
        made = producer(budget, device, device.link if link is None else link, host)
        return partitioned_graph.partition_joint(larger.copied(), *others, made, target=device)[0]

    return found


@pytest.fixture(scope="module")
def free(planned: Callable[..., PartitionedGraph]) -> int:
    """Bytes without a plan."""
    return planned(2**40).prediction.peak


@pytest.fixture(scope="module")
def floor(planned: Callable[..., PartitionedGraph]) -> int:
    """Bytes with recompute alone."""
    with pytest.raises(DoesNotFitError) as refused:
        planned(1, link=0.0)
    return int(float(str(refused.value).split("takes at least ")[1].split(" MiB")[0]) * MIB)


def offloaded(graph: PartitionedGraph) -> list[str]:
    return [c.activation.root.name for c in graph.choice.candidates if c.strategy is Strategy.OFFLOAD]


def extra_time(graph: PartitionedGraph) -> float:
    """As the header has it, in percent."""
    return float(graph.choice.why.split(": +")[1].split("%")[0])


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_the_plan_is_within_the_budget_and_faster(share: float, planned, free: int, floor: int) -> None:
    budget = int(floor * 1.02 + share * (free - floor))
    alone, both = planned(budget, link=0.0), planned(budget)
    assert not offloaded(alone)
    assert offloaded(both)
    assert both.prediction.peak <= budget
    assert extra_time(both) < extra_time(alone)
    # Copies are on the host, and take nothing of the device between forward and backward.
    assert "of the host for offload" in both.choice.why


def test_what_recompute_cannot_fit(planned, free: int, floor: int) -> None:
    budget = int(floor * 0.9)
    with pytest.raises(DoesNotFitError):
        planned(budget, link=0.0)
    assert planned(budget).prediction.peak <= budget


def test_a_link_that_stalls_the_step_is_not_used(planned, free: int, floor: int) -> None:
    assert not offloaded(planned((free + floor) // 2, device=NO_LINK))


def test_the_host_holds_what_it_has_room_for(planned, free: int, floor: int) -> None:
    budget = (free + floor) // 2
    graph = planned(budget)
    roots = {c.activation.root.name: c for c in graph.choice.candidates if c.strategy is Strategy.OFFLOAD}
    taken = sum(pinned_bytes(int(roots[name].saving)) for name in offloaded(graph))
    assert not offloaded(planned(budget, host=MIB))
    assert sum(
        pinned_bytes(int(c.saving))
        for c in planned(budget, host=taken).choice.candidates
        if c.strategy is Strategy.OFFLOAD
    ) == pytest.approx(taken)


def test_nothing_is_offloaded_where_everything_fits(planned, free: int) -> None:
    assert not offloaded(planned(2 * free))


def test_a_way_out_of_an_out_of_memory_error_counts_the_host(larger: Captured, floor: int) -> None:
    graph = partitioned_graph.analyze(larger.copied(), larger.inputs, larger.num_fwd_outputs, larger.others)
    problem = problem_of(graph, roofline(graph.joint, graph.size_hints, SLOW, fused=False).seconds)
    budget = int(0.8 * floor)
    alone, both = (Together([problem], [1], hosts=[host_of(graph, link, 2**40)]) for link in (0.0, SLOW.link))
    assert not alone.is_within(budget) and isinstance(alone.cheapest(budget), Floor)
    assert both.is_within(budget)
    found = both.cheapest(budget)
    assert found.peak <= budget and found.host_bytes > 0
    larger_budget = int(1.1 * floor)
    assert both.cheapest(larger_budget).extra_seconds < alone.cheapest(larger_budget).extra_seconds
    # Two graphs: what the first one leaves on the device counts for the second.
    twice = Together([problem, problem], [1, 1])
    found = twice.cheapest((alone.everything + twice.everything) // 2)
    assert alone.everything < found.peak < twice.everything
    assert found.extra_seconds > 0 == found.host_bytes
    # The host has as much room for both.
    offloading = Together([problem, problem], [1, 1], hosts=[host_of(graph, SLOW.link, 2**40)] * 2)
    assert not twice.is_within(int(0.9 * twice.lowest)) and offloading.is_within(int(0.9 * twice.lowest))
