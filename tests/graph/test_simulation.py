"""The simulation against the timeline of the graphs that the same nodes to save are partitioned into."""

import random
from dataclasses import replace

import pytest

from optimum_memopt.engines.compile.costs.costs import Costs
from optimum_memopt.engines.compile.graph.problem import Problem, SiblingGraphs, problem_of
from optimum_memopt.engines.compile.memory.events import Prediction, prediction_of, schedule
from optimum_memopt.engines.compile.memory.simulation import problem_events, simulate
from optimum_memopt.engines.compile.memory.tape import Call, Tape, compose
from optimum_memopt.engines.compile.partition import partitioned_graph
from optimum_memopt.engines.compile.partition.captured_graph import captured_graph, no_costs
from optimum_memopt.engines.compile.partition.partitioned_graph import partition
from optimum_memopt.engines.compile.partition.strategies.recompute import insert_barriers
from optimum_memopt.engines.compile.predict.planner import GraphReservations
from optimum_memopt.engines.compile.solver.solver import Solver
from optimum_memopt.plans.plan_file import GraphSignature
from tests.captured import Captured
from tests.rotation import nightly


def random_choice(problem: Problem, generator: random.Random) -> frozenset[int]:
    """Any share of the saved activations and layer boundaries, and a few nodes that are neither."""
    share = generator.random()
    roots = [
        node
        for node, root in enumerate(problem.roots)
        if node == root and problem.is_operator[node] and problem.is_tensor[node] and problem.is_forward[node]
    ]
    likely = problem.activations | problem.boundaries
    kept = {node for node in roots if generator.random() < (share if node in likely else 0.05)}
    return problem.closure(kept)


def partitioned(captured: Captured, problem: Problem, saved: frozenset[int]) -> Prediction:
    graph = partitioned_graph.analyze(captured.copied(), captured.inputs, captured.num_fwd_outputs, captured.others)
    nodes = [graph.joint.nodes[node] for node in sorted(saved)]
    assert [node.name for node in nodes] == [problem.names[node] for node in sorted(saved)]
    modules = partition(graph.joint, nodes)
    insert_barriers(*modules)
    return schedule(*modules, captured.num_fwd_outputs).predict(graph.size_hints)


@pytest.mark.parametrize("name", nightly(["roberta", "gpt2", "albert"], but=["roberta"]))
def test_every_choice_is_simulated_to_the_byte(name: str, request: pytest.FixtureRequest) -> None:
    captured = request.getfixturevalue(name)
    problem = problem_of(captured.graph, [0.0] * len(captured.joint.nodes))
    generator = random.Random(name)
    everything = problem.closure(problem.activations)
    choices = [everything, problem.closure(frozenset()), *(random_choice(problem, generator) for _ in range(12))]
    peaks = set()
    for saved in choices:
        ours, real = simulate(problem, saved), partitioned(captured, problem, saved)
        plain = prediction_of(problem_events(problem, saved))
        assert ours.saved_bytes == plain.saved_bytes == real.saved_bytes
        assert ours.forward.held == plain.forward.held == real.forward.held
        assert ours.backward.held == plain.backward.held
        assert ours.peak == plain.peak == real.peak
        assert ours.backward.end == plain.backward.end == real.backward.end
        peaks.add(ours.peak)
    assert len(peaks) > 10


def test_runs_of_a_graph_and_later_graphs_are_simulated(roberta: Captured) -> None:
    """Against the prediction of graphs that run one after the other."""
    captured = roberta
    problem = problem_of(captured.graph, [0.0] * len(captured.joint.nodes))
    kept = problem.closure(problem.activations), problem.closure(problem.boundaries)
    alone = [simulate(problem, saved) for saved in kept]
    graphs = [partitioned(captured, problem, saved) for saved in kept]
    # A loss, which the next graph is given.
    slack = sum(graph.forward.end - graph.saved_bytes for graph in graphs)
    events = [problem_events(problem, saved) for saved in kept]
    for saved, run in zip(kept, events, strict=True):
        found = simulate(replace(problem, siblings=SiblingGraphs(runs=4)), saved)
        assert 0 <= found.peak - compose(Tape((Call(0),) * 4), [run] * 4).peak() <= 4 * slack
    gradients = alone[1].backward.end - graphs[0].tangents
    others = SiblingGraphs(later=alone[1].peak, gradients=gradients)
    found = simulate(replace(problem, siblings=others), kept[0])
    assert 0 <= found.peak - compose(Tape((Call(0), Call(1))), events).peak() <= 2 * slack


def test_what_is_left_to_later_graphs(roberta: Captured) -> None:
    seconds = [1e-6] * len(roberta.joint.nodes)
    known = captured_graph(roberta.graph, Costs(tuple(seconds), "no"))
    alone = Solver(known.problem())
    graphs = GraphReservations()
    graphs.note(0, known)
    assert not graphs.learn((1,), alone.lowest.peak)
    graphs.note(1, known)
    allowed = alone.lowest.peak + alone.everything.peak
    assert graphs.learn((1,), allowed)
    first, second = (graphs.siblings(index, known.signature) for index in range(2))
    assert second == SiblingGraphs()
    # As fast as any split: with all of it for the first graph the second one would recompute all there is.
    Solver(replace(known.problem(), siblings=first)).solve(allowed)
    assert alone.lowest.peak < graphs.reserved == first.later < alone.everything.peak
    # The process has grown.
    assert graphs.learn((), allowed, 100)
    assert graphs.reserved == alone.lowest.peak
    assert not graphs.learn((), allowed, 100)
    assert graphs.learn((1,), allowed, 100)
    assert graphs.reserved == alone.lowest.peak + 100
    # torch compiles the second one again, alone.
    other = replace(known.signature, digest="another")
    assert graphs.siblings(0, other) == SiblingGraphs()


def test_what_came_behind_another_graph_is_forgotten(roberta: Captured) -> None:
    graphs = GraphReservations()
    first, second, other = (
        replace(captured_graph(roberta.graph, no_costs(roberta.graph)), signature=GraphSignature({}, {}, name))
        for name in "abc"
    )
    for index, graph in enumerate((first, second)):
        graphs.note(index, graph)
    graphs.note(0, first)
    assert graphs.count == 2
    graphs.note(0, other)
    assert graphs.count == 1
