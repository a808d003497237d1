"""The simulation against the timeline of the graphs partitioned for the same saved nodes."""

import random

import pytest

from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.engines.compile.graph.problem import Problem, problem_of
from optimum_memopt.engines.compile.memory.graph_events import Prediction, prediction_of
from optimum_memopt.engines.compile.memory.schedule import schedule
from optimum_memopt.engines.compile.memory.simulation import problem_events, simulate
from optimum_memopt.engines.compile.partition import partitioned_graph, strategies
from optimum_memopt.engines.compile.partition.captured_graph import no_costs
from optimum_memopt.engines.compile.partition.choice import SavedNodes
from optimum_memopt.engines.compile.partition.conversions import conversions_of
from optimum_memopt.engines.compile.partition.partitioned_graph import partition
from optimum_memopt.engines.compile.partition.strategies.recompute import insert_barriers
from tests.captured import Captured
from tests.rotation import nightly


def random_choice(problem: Problem, generator: random.Random) -> frozenset[int]:
    """Returns a random share of the saved activations and layer boundaries, and a few other nodes."""
    share = generator.random()
    roots = [
        node
        for node, root in enumerate(problem.roots)
        if node == root and problem.is_operator[node] and problem.is_tensor[node] and problem.is_forward[node]
    ]
    likely = problem.activations | problem.boundaries
    kept = {node for node in roots if generator.random() < (share if node in likely else 0.05)}
    return problem.closure(kept)


def analyzed(captured: Captured, fuses: bool) -> AnalyzedGraph:
    given = captured.copied(), captured.inputs, captured.num_fwd_outputs, captured.others
    return partitioned_graph.analyze(*given, fuses=fuses)


def partitioned(captured: Captured, problem: Problem, saved: frozenset[int], fuses: bool) -> Prediction[str]:
    graph = analyzed(captured, fuses)
    nodes = [graph.joint.nodes[node] for node in sorted(saved)]
    assert [node.name for node in nodes] == [problem.names[node] for node in sorted(saved)]
    modules = partition(graph.joint, nodes)
    insert_barriers(*modules)
    return schedule(*modules, captured.num_fwd_outputs, inlined=graph.inlined).predict(graph.size_hints)


@pytest.mark.parametrize("name", nightly(["roberta", "gpt2", "albert"], but=["roberta"]))
@pytest.mark.parametrize("fuses", nightly([False, True], but=[False]), ids=["operators", "kernels"])
def test_every_choice_is_simulated_to_the_byte(name: str, fuses: bool, request: pytest.FixtureRequest) -> None:
    captured = request.getfixturevalue(name)
    graph = analyzed(captured, fuses)
    assert bool(graph.inlined.operands) == fuses
    problem = problem_of(graph, [0.0] * len(captured.joint.nodes))
    generator = random.Random(name)
    everything = problem.closure(problem.activations)
    choices = [everything, problem.closure(frozenset()), *(random_choice(problem, generator) for _ in range(12))]
    peaks = set()
    for saved in choices:
        ours, real = simulate(problem, saved), partitioned(captured, problem, saved, fuses)
        plain = prediction_of(problem_events(problem, saved))
        assert ours.saved_bytes == plain.saved_bytes == real.saved_bytes
        assert ours.forward.held == plain.forward.held == real.forward.held
        assert ours.backward.held == plain.backward.held
        assert ours.peak == plain.peak == real.peak
        assert ours.backward.end == plain.backward.end == real.backward.end
        peaks.add(ours.peak)
    assert len(peaks) > 10


@pytest.mark.parametrize("name", nightly(["roberta", "gpt2", "albert"], but=["roberta"]))
@pytest.mark.parametrize("fuses", nightly([False, True], but=[False]), ids=["operators", "kernels"])
def test_compression_is_simulated_to_the_byte(name: str, fuses: bool, request: pytest.FixtureRequest) -> None:
    captured = request.getfixturevalue(name)
    graph = analyzed(captured, fuses)
    plain = problem_of(graph, [0.0] * len(captured.joint.nodes))
    conversions = conversions_of(graph, no_costs)
    problem = conversions.added_to(plain, graph.size_hints)
    generator = random.Random(name)
    everything = problem.closure(problem.activations)
    for saved in (everything, *(random_choice(problem, generator) for _ in range(8))):
        assert simulate(problem, saved).peak == simulate(plain, saved).peak
        share = generator.random()
        allowed = sorted(problem.conversions.keys() & saved)
        compressed = frozenset(node for node in allowed if generator.random() < share or saved == everything)
        ours = simulate(problem, saved, compressed)
        again = analyzed(captured, fuses)
        choice = SavedNodes(tuple(sorted(saved)), compressed=compressed).choice(again, "")
        modules = partition(again.joint, choice.nodes_to_save)
        strategies.rewrite(modules, choice.candidates)
        real = partitioned_graph.timeline_of(again, modules).predict(graph.size_hints)
        assert ours.saved_bytes == real.saved_bytes
        assert ours.forward.held == real.forward.held
        assert ours.peak == real.peak
        assert ours.backward.end == real.backward.end
