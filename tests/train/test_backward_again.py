"""Several backwards of one forward, writes to its outputs before the first one, and backwards from some outputs."""

import copy

import pytest
import torch
from packaging.version import Version
from torch._functorch import config as functorch_config

from optimum_memopt import optimize
from tests.gradients import Sink
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly
from tests.train.test_hooks import Net

ENGINE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
PLANS = [{}, {"memory_opt_level": 1}, {"memory_opt_config": "Gelu+Add+:3:-1"}]


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_equal(ours, expected):
    assert len(ours) == len(expected) and all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_backward_runs_as_often_as_it_is_asked_to(plan):
    ours, plain, x = Net(), Net(), torch.randn(4, 8)
    optimize(ours, **ENGINE, **plan)
    for model in (ours, plain):
        loss = model(x).loss
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
    assert_equal(gradients(ours), gradients(plain))
    created = [
        torch.autograd.grad(model(x).loss, list(model.parameters()), create_graph=True) for model in (ours, plain)
    ]
    assert_equal(*created)


@pytest.mark.nightly
def test_inductor_overwrites_saved_activations_unless_told_not_to():
    def twice(model):
        loss = model(x).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    x = torch.randn(4, 8)
    model = Net()
    optimize(model, memory_opt_engine="compile", memory_opt_compiler="inductor", memory_opt_level=1)
    with pytest.raises(RuntimeError, match="^This backward function was compiled with .*donated_buffer=False.*$"):
        twice(model)
    with functorch_config.patch(donated_buffer=False):
        model = Net()
        optimize(model, memory_opt_engine="compile", memory_opt_compiler="inductor", memory_opt_level=1)
        torch.testing.assert_close(twice(model), twice(Net()))


def test_a_second_derivative_is_refused_in_a_line():
    model = Net()
    optimize(model, **ENGINE)
    first = torch.autograd.grad(model(torch.randn(4, 8)).loss, list(model.parameters()), create_graph=True)
    with pytest.raises(
        RuntimeError, match="^torch.compile with aot_autograd does not currently support double backward$"
    ):
        sum(gradient.square().sum() for gradient in first).backward()


class Copies(torch.nn.Module):
    """A model whose outputs are copies of tensors that its backward reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.linear(x))
        return {
            "loss": torch.nn.functional.dropout(h, 0.0).square().sum(),
            "clone": h.clone(),
            "detached": h.detach().clone(),
            "view": h.clone().view(2, -1),
        }


@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
def test_a_caller_may_write_to_an_output_that_is_a_copy(plan):
    ours, plain, x = Copies(), Copies(), torch.randn(3, 4)
    optimize(ours, **ENGINE, **plan)
    for model in (ours, plain):
        outputs = model(x)
        with torch.no_grad():
            for name in ("clone", "detached", "view"):
                outputs[name].data.zero_()
        outputs["loss"].backward()
    assert_equal(gradients(ours), gradients(plain))


class TwoGraphs(torch.nn.Module):
    """Two graphs, each with an output that a loss may not read; the second reads both outputs of the first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        beside = torch.tanh(self.second(x))
        torch._dynamo.graph_break()
        return x.square(), self.third(beside)


@in_turn
@pytest.mark.parametrize("unit", nightly(["model", "layer", "graphs"], but=["layer", "graphs"]))
def test_what_only_unread_outputs_depend_on_has_no_gradient(unit):
    if unit == "graphs":
        ours, x, plan = TwoGraphs(), torch.randn(4, 16), {}
    else:
        case, plan = ZOO["bert-classification"], {"memory_opt_unit": unit, "memory_opt_level": 1}
        ours, x = case.build("eager").bert, case.batch()["input_ids"]
    plain = copy.deepcopy(ours)
    engine = optimize(ours, **ENGINE, **plan)
    # The loss reads hidden states without the pooler, the pooler, and hidden states again, finally through DDP's sink.
    for place, is_handed_on in ((0, False), (1, False), (0, False), (0, True)):
        for model in (ours, plain):
            model.zero_grad(set_to_none=True)
            outputs = model(x)
            outputs = Sink.apply(outputs[0], outputs[1]) if is_handed_on else outputs
            outputs[place].square().sum().backward()
        gradients, expected = ({name: each.grad for name, each in model.named_parameters()} for model in (ours, plain))
        unread = {name for name, gradient in expected.items() if gradient is None}
        assert bool(unread) == (place == 0)
        assert {name for name, gradient in gradients.items() if gradient is None} == unread
        assert all(torch.equal(gradients[name], expected[name]) for name in expected.keys() - unread)
    engine.detach()


class TwoHeads(torch.nn.Module):
    """Layers with two heads, each with a loss of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(4)
        )
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return [head(x).square().mean() for head in self.heads]


def one_after_the_other(losses, shared):
    for loss in reversed(losses):
        loss.backward(retain_graph=True)


def weighted_by_norms(losses, shared):
    """Weight each loss by the norm of its gradient, as GradNorm does (https://arxiv.org/abs/1711.02257)."""
    norms = [torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses]
    sum(loss / norm for loss, norm in zip(losses, norms, strict=True)).backward()


@pytest.mark.parametrize("unit", ["model", "layer"])
@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
@pytest.mark.parametrize("backward", [one_after_the_other, weighted_by_norms])
def test_a_backward_of_one_loss_leaves_nothing_for_the_next(backward, plan, unit):
    ours, x = TwoHeads(), torch.randn(5, 8)
    plain = copy.deepcopy(ours)
    optimize(ours, **ENGINE, **plan, memory_opt_unit=unit)
    for model in (ours, plain):
        backward(model(x), model.layers[-1][2].weight)
    torch.testing.assert_close(gradients(ours), gradients(plain), rtol=1e-5, atol=1e-7)


class SumsOfWeights(torch.nn.Module):
    """Pairs of parameters that are added to each other, and so have equal gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shapes = {"weight": (8, 8), "other_weight": (8, 8), "bias": (8,), "other_bias": (8,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

    def forward(self, x):
        x = torch.nn.functional.linear(x, self.weight + self.other_weight, self.bias + self.other_bias)
        return x.tanh().square().sum()


@pytest.mark.parametrize("compiler", nightly(["aot_eager", "inductor"], but=["aot_eager"]))
@pytest.mark.parametrize("plan", PLANS[:2], ids=str)
def test_no_two_gradients_share_memory(plan, compiler):
    """Code that changes gradients in place, such as clipping, changes each of them once."""
    ours, plain, x = SumsOfWeights(), SumsOfWeights(), torch.randn(5, 8)
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler=compiler, **plan)
    for model in (ours, plain):
        for _ in range(2):
            model(x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert len({each.grad.untyped_storage().data_ptr() for each in ours.parameters()}) == 4
    torch.testing.assert_close(gradients(ours), gradients(plain))


class Doubled(torch.autograd.Function):
    """A function with two results, whose backward computes with both gradients."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, of_first, of_second):
        (x,) = ctx.saved_tensors
        return of_first * 2 + (of_second + 1) * 3 * x


class ReadsOneResult(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        first, _ = Doubled.apply(self.linear(x))
        return first.tanh().sum()


@pytest.mark.skipif(Version(torch.__version__).release[:2] == (2, 11), reason="torch 2.11 passes no gradient")
def test_an_unread_result_of_a_function_has_a_gradient_of_zeros():
    ours, plain, x = ReadsOneResult(), ReadsOneResult(), torch.randn(5, 8)
    engine = optimize(ours, **ENGINE, memory_opt_level=1)
    for model in (ours, plain):
        model(x).backward()
    assert_equal(gradients(ours), gradients(plain))
    assert engine.plans().header and not engine.plans().header[0].startswith("NOT")
