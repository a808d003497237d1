"""The graphs of a forward as one problem, against the composition of each graph's events."""

import random
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from optimum_memopt.engines.api.run import HeldOutputs, HeldUntil
from optimum_memopt.engines.compile.capture.capture import Capture, chosen_by
from optimum_memopt.engines.compile.capture.layer_groups import layer_groups
from optimum_memopt.engines.compile.capture.ranks import planned_ranks
from optimum_memopt.engines.compile.capture.traced_graph import TraceSpec
from optimum_memopt.engines.compile.memory.composition import compose
from optimum_memopt.engines.compile.memory.eager_loss import EagerLoss, LossEvents
from optimum_memopt.engines.compile.memory.simulation import problem_events, simulate
from optimum_memopt.engines.compile.options import LAYER
from optimum_memopt.engines.compile.partition.captured_forward import CapturedForward
from optimum_memopt.engines.compile.partition.producers.stated import FromLevel
from optimum_memopt.engines.compile.sharding.zero3 import LeafSteps, Zero3Sharding
from optimum_memopt.engines.compile.solver.forward_solver import ForwardSolver
from optimum_memopt.engines.simulator.events import Event, Storage
from optimum_memopt.engines.torch_compat.fake_tensors import fake_copy, fake_model
from optimum_memopt.engines.torch_compat.zero3 import PartitionedParameter, Partitioning
from optimum_memopt.errors import MemOptError
from tests.captured import by_bytes
from tests.graph.test_simulation import random_choice
from tests.model_zoo import ZOO
from tests.rotation import nightly

# Encoder states that all decoder layers read, shared position terms, a loss of its own.
MODELS = ["roberta-mlm", "llama", "deberta-v2-mlm", "t5", "gpt2"]
# Only the first block of a T5 has position terms.
_CHANGES = {"t5": {"num_layers": 3, "num_decoder_layers": 3}}


def captured(name: str, *sizes: int, ranks: int = 1, only_layers: bool = False, **changes: int) -> CapturedForward:
    case = ZOO[name]
    mode, model = fake_model(case.build(**_CHANGES.get(name, changes)))
    spec = TraceSpec("aot_eager", unit=LAYER, only_layers=only_layers)
    with planned_ranks(ranks, "cpu") as mesh, mode:
        if mesh is not None:
            for layer in [layer for group in layer_groups(model) for layer in group.values()]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        batch = fake_copy(dict(case.batch(*sizes)), mode)
        return Capture(model, (), batch, spec, chosen_by(FromLevel(1))).run(by_bytes)


def around_leafs(name: str, forward: CapturedForward) -> CapturedForward:
    """Returns a layered forward as under ZeRO 3 on 8 ranks, which release each layer after its use."""
    case = ZOO[name]
    model = case.build(**_CHANGES.get(name, {}))
    parameters = {
        name: PartitionedParameter(order, each.shape, -(-each.numel() // 8), each.dtype, False, order)
        for order, (name, each) in enumerate(model.named_parameters(remove_duplicate=False))
    }
    kinds = (torch.float32,) * 3
    spec = Partitioning(8, parameters, 2000, 0, 10**6, 3000, *kinds)
    layers = [path for group in layer_groups(model) for path in group]
    tape = forward.tape

    def run(args: tuple[object, ...], inputs: dict[str, object]) -> object:
        return type(model).forward(model, *args, **inputs)

    steps = LeafSteps(model, run, (), case.batch(), spec, layers, {call.layer for call in tape.calls})
    return replace(forward, tape=tape.under(Zero3Sharding(steps, spec.ranks, spec.prefetched)))


@pytest.mark.parametrize("around", nightly(["nothing", "FSDP2", "ZeRO 3"], but=["nothing"]))
@pytest.mark.parametrize("name", nightly(MODELS, but=["roberta-mlm"]))
def test_every_choice_of_every_run_is_simulated_to_the_byte(name: str, around: str) -> None:
    is_leaf = around == "ZeRO 3"
    forward = captured(name, ranks=8 if around == "FSDP2" else 1, only_layers=is_leaf)
    assert len(forward.tape.calls) > len(forward.graphs) > (0 if is_leaf else 1)
    forward = around_leafs(name, forward) if is_leaf else forward
    tape = forward.tape
    if is_leaf and name == "deberta-v2-mlm":
        # Its encoder reads a parameter of a module that it does not call; DeepSpeed gathers it at that point.
        with pytest.raises(MemOptError, match="outside of the layers of .* cannot be run on tensors without data"):
            tape.collectives([()] * len(tape.calls))
        return
    # Under ZeRO 3, the gradient of the last layer is held from the loss on.
    assert_simulated(forward, 0.05 if is_leaf else 0.0)


HELD = [
    HeldOutputs(until, copies, loss=loss, left=loss / 4)
    for until in HeldUntil
    for copies in (0.0, 2.0)
    for loss in (0.0, 2.0)
    if until or copies or loss
]


@pytest.mark.parametrize(
    "held", nightly(HELD, but=HELD[-1:]), ids=lambda held: f"{held.until.name}-{held.copies}-{held.loss}"
)
@pytest.mark.parametrize("name", nightly(MODELS, but=["roberta-mlm"]))
def test_outputs_that_a_loop_holds_are_simulated_to_the_byte(name: str, held: HeldOutputs) -> None:
    forward = captured(name)
    dropped = forward.problem(forward.first)
    holding = replace(forward, tape=replace(forward.tape, held_outputs=held))
    assert_simulated(holding)
    problem = holding.problem(holding.first)
    everything = [each.closure(each.activations) for each in problem.runs]
    more = (simulate(each.problem, each.of_all(everything)).saved_bytes for each in (problem, dropped))
    # Some outputs are saved anyway, such as those of a T5's encoder.
    more_bytes = next(more) - next(more)
    assert 0 < more_bytes <= problem.outputs if held.until else problem.outputs == 0
    # Without copies, the forward returns equally many bytes.
    assert held.until or (more_bytes > 0) == bool(held.left)


@pytest.mark.parametrize("name", nightly(MODELS, but=["roberta-mlm"]))
def test_a_loss_that_drops_results_is_simulated_to_the_byte(name: str) -> None:
    """A loss outside of the forward copies the results, drops them, and computes from the copy."""
    mib = 2**20
    copied = Event("to", allocates=(Storage("copy", 2 * mib),))
    computed = Event("exp", allocates=(Storage("exp", 3 * mib),), workspace=mib)
    gradient = (Event("mul", allocates=(Storage("gradient", 2 * mib),), frees=("exp", "copy")),)
    freed = (Event("", frees=("gradient",)),)
    drops = LossEvents(behind=(copied,), backward=(*gradient, *freed), without_results=(computed,))
    holds = LossEvents(behind=(copied, computed), backward=drops.backward)
    forward, saved, peaks = captured(name), set[int](), []
    for events in (holds, drops):
        loss = EagerLoss("the loss", lambda _, events=events: events)
        of_loss = replace(forward, tape=replace(forward.tape, loss=loss))
        # The gradient of the model's own loss exists from the loss on.
        assert_simulated(of_loss, at_most=4)
        problem = of_loss.problem(of_loss.first)
        everything = simulate(problem.problem, problem.of_all([run.closure(run.activations) for run in problem.runs]))
        saved.add(everything.saved_bytes)
        peaks.append(everything.forward.peak)
    assert len(saved) == 1 and peaks[1] < peaks[0]


def assert_simulated(captured: CapturedForward, most: float = 0.0, at_most: int = 0) -> None:
    """Assert each choice's bytes in the problem; its peak may be higher by a share (`most`) plus `at_most` bytes."""
    tape, forward = captured.tape, captured.problem(captured.first)
    generator = random.Random(0)
    everything = [problem.closure(problem.activations) for problem in forward.runs]
    choices = [everything, *([random_choice(p, generator) for p in forward.runs] for _ in range(8))]
    for saved in choices:
        simulation = simulate(forward.problem, forward.of_all(saved))
        events = [problem_events(problem, nodes) for problem, nodes in zip(forward.runs, saved, strict=True)]
        step = compose(tape, events)
        assert simulation.saved_bytes == step.saved_bytes
        assert 0 <= simulation.peak - step.peak() <= at_most + most * step.peak()
        assert forward.of_runs(simulation.saved) == tuple(saved)
    solver = ForwardSolver(forward)
    plan = solver.cheapest((solver.lowest + solver.everything) // 2)
    events = [
        problem_events(problem, nodes)
        for problem, nodes in zip(forward.runs, forward.of_runs(plan.saved), strict=True)
    ]
    assert 0 <= plan.peak - compose(tape, events).peak() <= at_most + most * plan.peak


class Between(torch.nn.Module):
    """Eager operators between two graphs and after the last one save their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.first(x))
        x = _squared_sigmoid(x)
        x = torch.nn.functional.gelu(self.second(x))
        y = _squared_sigmoid(torch.nn.functional.gelu(self.third(x)))
        return _squared_sigmoid((x * y).mean())


class Behind(torch.nn.Module):
    """The eager loss after the only graph saves more than the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _loss(self.second(torch.nn.functional.gelu(self.first(x))))


@torch.compiler.disable
def _loss(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid().square().log().mean()


@torch.compiler.disable
def _squared_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid().square()


@pytest.mark.parametrize("model", [Between, Behind])
def test_what_runs_outside_of_graphs_is_simulated(model: type[torch.nn.Module]) -> None:
    spec = TraceSpec("aot_eager")
    forward = Capture(model(), (torch.randn(64, 16),), {}, spec, chosen_by(FromLevel(1))).run(by_bytes)
    last = len(forward.tape.calls) - 1
    assert (last > 0) == (model is Between)
    assert {operator.call for operator in forward.tape.outside} >= {0, last}
    # The gradient of the loss.
    assert_simulated(forward, at_most=4)


@pytest.mark.nightly
def test_layers_use_what_a_gradient_of_embeddings_leaves_them() -> None:
    """No memory is left beside that gradient; layers share memory that a search for a single layer does not see."""
    forward = captured("llama", 32, 48, num_hidden_layers=5)
    solver = ForwardSolver(forward.problem(forward.first))
    plan = solver.cheapest(solver.lowest)
    assert plan.peak == solver.lowest
    assert plan.extra_seconds < 0.95 * solver.solver.plan(solver.solver.lowest).extra_seconds
