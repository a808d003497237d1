"""The graphs of a forward as one problem, against the composition of each graph's own events."""

import random

import pytest
from torch.distributed.fsdp import fully_shard

from optimum_memopt.engines.compile.capture.capture import Capture, chosen_by
from optimum_memopt.engines.compile.capture.planned_shards import planned_ranks
from optimum_memopt.engines.compile.capture.regions import layer_groups
from optimum_memopt.engines.compile.capture.traced_forward import TraceSpec
from optimum_memopt.engines.compile.memory.simulation import problem_events, simulate
from optimum_memopt.engines.compile.memory.tape import compose
from optimum_memopt.engines.compile.options import LAYER
from optimum_memopt.engines.compile.partition.captured_forward import ForwardSolver, problem_of
from optimum_memopt.engines.compile.partition.captured_graph import CapturedGraph
from optimum_memopt.engines.compile.partition.producers.stated import FromLevel
from optimum_memopt.engines.compile.torch_compat.fake_tensors import fake_copy, fake_model
from tests.captured import by_bytes
from tests.graph.test_simulation import random_choice
from tests.model_zoo import ZOO
from tests.rotation import nightly

# Encoder states that all layers of a decoder read, position terms that are shared, a loss of its own.
MODELS = ["roberta-mlm", "llama", "deberta-v2-mlm", "t5", "gpt2"]
# The first block of a T5 has position terms, which no other one has.
_CHANGES = {"t5": {"num_layers": 3, "num_decoder_layers": 3}}


def captured(name: str, *sizes: int, ranks: int = 1, **changes: int) -> tuple[CapturedGraph, ...]:
    case = ZOO[name]
    mode, model = fake_model(case.build(**_CHANGES.get(name, changes)))
    spec = TraceSpec("aot_eager", unit=LAYER)
    with planned_ranks(ranks, "cpu") as mesh, mode:
        if mesh is not None:
            for layer in [layer for group in layer_groups(model) for layer in group.values()]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        batch = fake_copy(dict(case.batch(*sizes)), mode)
        return Capture(model, (), batch, spec, chosen_by(FromLevel(1))).run(by_bytes)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", nightly(MODELS, but=["roberta-mlm", "llama"]))
def test_every_choice_of_every_run_is_simulated_to_the_byte(name: str, is_sharded: bool) -> None:
    graphs = captured(name, ranks=8 if is_sharded else 1)
    tape = graphs[0].tape
    assert len(tape.calls) > len(graphs) > 1
    forward = problem_of(graphs, [graph.sizes for graph in graphs])
    generator = random.Random(name)
    everything = [problem.closure(problem.activations) for problem in forward.runs]
    choices = [everything, *([random_choice(p, generator) for p in forward.runs] for _ in range(8))]
    for saved in choices:
        simulation = simulate(forward.problem, forward.of_all(saved))
        events = [problem_events(problem, nodes) for problem, nodes in zip(forward.runs, saved, strict=True)]
        step = compose(tape, events)
        assert simulation.saved_bytes == step.saved_bytes
        # A gradient that an encoder is given may be held one operator longer.
        assert 0 <= simulation.peak - step.peak() <= (0.05 * step.peak() if name == "t5" else 0)
        assert forward.of_runs(simulation.saved) == tuple(saved)
    solver = ForwardSolver(forward)
    plan = solver.cheapest((solver.lowest + solver.everything) // 2)
    events = [
        problem_events(problem, nodes)
        for problem, nodes in zip(forward.runs, forward.of_runs(plan.saved), strict=True)
    ]
    assert 0 <= plan.peak - compose(tape, events).peak() <= (0.05 * plan.peak if name == "t5" else 0)


def test_layers_use_what_a_gradient_of_embeddings_leaves_them() -> None:
    """Where nothing is left beside that gradient, and layers share what the search for one of them does not see."""
    graphs = captured("llama", 32, 48, num_hidden_layers=5)
    solver = ForwardSolver(problem_of(graphs, [graph.sizes for graph in graphs]))
    plan = solver.cheapest(solver.lowest)
    assert plan.peak == solver.lowest
    assert plan.extra_seconds < 0.95 * solver.solver.plan(solver.solver.lowest).extra_seconds
