"""The analysis of storages against real runs of the graph."""

import operator

import pytest
import torch

from optimum_memopt.engines.compile.graph.joint import is_number, is_tensor, is_view, root, storage_bytes
from tests.captured import Captured, Executed, capture


class Odd(torch.nn.Module):
    """All kinds of views, splits, in-place operators, and an unused product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 12)
        self.norm = torch.nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        first, second, third = y.transpose(1, 2).split(4, dim=1)
        left, right = first.chunk(2, dim=2)
        wide = (left * right).sum(1, keepdim=True).expand(-1, 4, -1)
        y = y.clone()
        y[:, 0].mul_(2)
        y.relu_()
        columns = (second * third).permute(0, 2, 1).reshape(-1, 4)[::2].unbind(1)
        squares = torch.stack([column.sin() for column in columns]).t().unsqueeze(0).squeeze(0)
        return self.norm(y).sin().sum() + wide.square().sum() + (squares @ squares.mT).exp().sum()


@pytest.fixture(scope="module", params=[True, False], ids=["symbolic", "fixed sizes"])
def odd(request: pytest.FixtureRequest) -> Captured:
    return capture(Odd().forward, torch.randn(3, 6, 8), dynamic=request.param)


def check_storages(captured: Captured) -> None:
    joint = captured.joint
    made = Executed(joint, captured.sizes).made
    views = 0
    for node, tensor in made.items():
        if node.op == "output" or not is_tensor(node):
            continue
        storage = tensor.untyped_storage()
        assert storage.data_ptr() == made[root(node)].untyped_storage().data_ptr(), node
        if node.op == "call_function" and not is_view(node):
            others = [read for read in node.all_input_nodes if is_tensor(read)]
            assert all(made[read].untyped_storage().data_ptr() != storage.data_ptr() for read in others), node
            assert storage_bytes(node).subs(captured.sizes) == storage.nbytes(), node
        views += is_view(node)
    assert views > 10


def test_views_are_followed_to_what_allocates(odd):
    check_storages(odd)


def test_views_of_real_models_are_followed_to_what_allocates(roberta, gpt2):
    check_storages(roberta)
    check_storages(gpt2)


@pytest.mark.parametrize("odd", [True], indirect=True)
def test_sizes_hold_for_other_batches(odd):
    sizes = {symbol: size + 2 for symbol, size in odd.sizes.items()}
    made = Executed(odd.joint, sizes).made
    roots = [node for node in odd.joint.forward if is_tensor(node) and root(node) is node]
    assert len(roots) > 10
    for node in roots:
        assert storage_bytes(node).subs(sizes) == made[node].untyped_storage().nbytes(), node


def test_nothing_of_the_forward_needs_a_gradient(roberta):
    joint = roberta.joint
    tangents = {node for node in joint.nodes if node.op == "placeholder" and node not in joint.inputs}
    assert tangents
    assert not set(joint.forward) & joint.backward
    assert set(joint.forward) | joint.backward | set(joint.inputs) == {n for n in joint.nodes if n.op != "output"}
    for node in joint.forward:
        assert not set(node.all_input_nodes) & joint.backward
    assert set(joint.forward_outputs) <= {*joint.forward, *joint.inputs}
    assert set(joint.backward_outputs) <= joint.backward


def test_empty_tensors_have_no_bytes():
    captured = capture(
        lambda x: (torch.cat([x.sin(), x[:, :0].exp()], 1)).cos().sum(), torch.randn(3, 4, requires_grad=True)
    )
    sizes = {node.name: storage_bytes(node).subs(captured.sizes) for node in captured.joint.forward if is_tensor(node)}
    assert sizes["exp"] == 0 and sizes["sin"] == 48


def test_a_size_that_the_forward_returns_is_compared_as_one():
    """A size that a view computes is a number if the forward returns it, as after a graph break."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        rows = x.shape[0] * x.shape[1]
        return x.view(rows, 8).sin().view(rows, 8).cos(), rows

    captured = capture(forward, torch.randn(3, 5, 8, requires_grad=True))
    assert any(is_number(node) for node in captured.joint.forward_outputs)
    assert sum(node.name.startswith("view") for node in captured.joint.forward) == 1


def test_a_view_that_is_returned_behind_the_backward_is_the_forwards():
    """A view that functionalization recreates, after a write to its base, belongs to the forward."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        base = x.sin()
        view = base.transpose(0, 1)
        base[:2].mul_(2.0)
        return view

    joint = capture(forward, torch.randn(4, 6, requires_grad=True)).joint
    (returned,) = joint.forward_outputs
    assert max(map(joint.nodes.index, joint.backward)) < joint.nodes.index(returned)
    assert returned not in joint.backward


class Coded(torch.autograd.Function):
    """A product with a weight that is stored as codes only: both passes dequantize it."""

    @staticmethod
    def forward(ctx, x, codes):
        ctx.codes = codes
        return x @ codes.float().mul(0.1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.codes.float().mul(0.1).t(), None


class Quantized(torch.nn.Module):
    """Trains vectors between products with frozen codes; ends in a product or a norm."""

    def __init__(self, ends_in_norm: bool) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.ends_in_norm = ends_in_norm
        codes = torch.randint(-8, 8, (2, 16, 16), dtype=torch.int8)
        self.register_buffer("codes", codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        for codes in self.codes:
            y = Coded.apply(torch.nn.functional.gelu(y), codes)
        return torch.nn.functional.layer_norm(y, (16,)) if self.ends_in_norm else y


@pytest.mark.parametrize("ends_in_norm", [False, True])
def test_what_a_backward_dequantizes_is_the_backwards(ends_in_norm):
    captured = capture(Quantized(ends_in_norm).forward, torch.randn(4, 16))
    joint = captured.joint
    casts = [node for node in joint.nodes if node.target is torch.ops.aten._to_copy.default]
    assert [node in joint.backward for node in casts] == [False, False, True, True]
    # A norm's statistics come after the output they were computed with.
    assert len([node for node in joint.forward if node.target is operator.getitem]) == (3 if ends_in_norm else 0)
    rows = [row for row in captured.configs if row.endswith(":1:-1")]
    assert rows
    for row in rows:
        saved = [node.meta["val"].shape[0] for node in captured.split(row).saved_for_backward]
        assert 16 not in saved, row
