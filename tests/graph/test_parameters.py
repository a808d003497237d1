"""A plan by name saves nothing that depends only on frozen weights, buffers and constants."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.graph.joint import is_tensor, root
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.graph.saved_activations import operator_name
from optimum_memopt.engines.compile.partition.choice import Choice, graph_plan
from optimum_memopt.engines.compile.partition.producers.stated import FromPlanFile
from optimum_memopt.engines.compile.solver.solver import Solver
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.plans.plan_file import PlanFile
from tests.captured import Captured, capture
from tests.compiled import selection
from tests.gradients import accumulate, assert_bitwise_same
from tests.rotation import nightly

WIDTH, LENGTH, PLANS = 64, 48, ("Gelu+Cast+:1:-1", "level 1", "level 2")


class Block(torch.nn.Module):
    """A frozen projection with a trainable low-rank one, scores with a mask, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2)
        self.frozen.requires_grad_(False)
        self.raise_rank = torch.nn.Linear(2, WIDTH)
        self.register_buffer("factors", torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        distances = -(places[:, None] - places).abs().float().exp2().reciprocal()
        # Takes as many operations as a product of activations.
        product = self.factors[0] @ self.factors[1]
        noise = torch.rand(x.shape[1], WIDTH)
        scores = (x @ x.transpose(-1, -2) * distances).softmax(-1)
        x = scores @ x * noise @ product
        return functional.gelu(self.frozen(x) + self.raise_rank(self.trained(x)))


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(WIDTH, 3 * WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = x + layer(x)
            return SimpleNamespace(loss=self.head(x).float().square().mean())


@pytest.fixture(scope="module")
def adapted() -> Captured:
    torch.manual_seed(0)
    model = Adapted()
    return capture(lambda x: model(x).loss, torch.randn(3, LENGTH, WIDTH, requires_grad=True))


def constants(captured: Captured) -> list[torch.fx.Node]:
    """Returns the roots of saved activations that are constants."""
    return [one.root for one in captured.activations if one.root in captured.graph.constants]


def test_casts_of_frozen_weights_and_masks_are_constants(adapted):
    # A mask and a weight in each layer, and the weight of the head, which is outside all layers.
    assert sorted(map(operator_name, constants(adapted))) == ["_to_copy"] * 3 + ["neg"] * 2
    assert {"mm", "rand"} <= {operator_name(one.root) for one in adapted.activations}


@pytest.mark.parametrize("asked", PLANS)
def test_no_plan_by_name_saves_them(adapted, asked):
    parts = adapted.split(asked)
    saved = {root(node).name for node in parts.saved_for_backward if is_tensor(node)}
    names = {node.name for node in constants(adapted)}
    assert names and saved.isdisjoint(names)
    assert names <= set(parts.recomputed(adapted.joint))
    assert "rand" not in parts.operators_of_backward


def test_what_two_frozen_matrices_give_is_saved(adapted):
    products = [one.root for one in adapted.activations if set(one.root.all_input_nodes) <= adapted.graph.constants]
    products = [node for node in products if operator_name(node) == "mm"]
    saved = {root(node).name for node in adapted.split(PLANS[0]).saved_for_backward if is_tensor(node)}
    assert len(products) == 2 and {node.name for node in products} <= saved
    assert set(products) <= {candidate.activation.root for candidate in adapted.candidates}


def test_a_cast_of_a_trained_weight_is_none(adapted):
    gradients = adapted.joint.outputs[adapted.num_fwd_outputs :]
    pairs = zip(adapted.joint.inputs, gradients, strict=True)
    trained = [node for node, gradient in pairs if gradient is not None and node in adapted.graph.static_inputs]
    readers = {user for node in trained for user in node.users if user in adapted.joint.forward}
    assert len(trained) == 8 and readers and readers.isdisjoint(adapted.graph.constants)


def test_a_budget_may_save_them_and_a_plan_file_saves_what_it_has(adapted):
    problem = problem_of(adapted.graph, [1e-6] * len(adapted.joint.nodes))
    solver, names = Solver(problem), {node.name for node in constants(adapted)}
    assert names <= {problem.names[node] for node in solver.everything.saved}
    assert names.isdisjoint(problem.names[node] for node in solver.layers_recomputed.saved)

    everything = Choice(tuple(adapted.joint.nodes[node] for node in sorted(solver.everything.saved)), "budget")
    for choice in (everything, adapted.choose("level 1")):
        file = PlanFile(why=choice.why, loss="plain", solved_for={}, graphs=(graph_plan(adapted.graph, choice),))
        assert FromPlanFile(file).choose(adapted.graph).nodes_to_save == choice.nodes_to_save


@pytest.mark.parametrize("asked", nightly(PLANS, but=["level 1"]))
def test_gradients_stay_bitwise(asked):
    torch.manual_seed(0)
    model, batch = Adapted(), {"x": torch.randn(3, LENGTH, WIDTH, requires_grad=True)}
    torch.manual_seed(1)
    expected = accumulate(model, [batch])
    engine = CompileEngine(selection(asked), "aot_eager")
    engine.attach(model)
    torch.manual_seed(1)
    assert_bitwise_same(accumulate(model, [batch]), expected)
    assert engine.plans().enabled
    engine.detach()
