"""What the analysis says of storages, against what running the graph makes."""

import pytest
import torch

from optimum_memopt.engines.compile.analysis.joint import is_tensor, is_view, root, storage_bytes
from tests.engines.compile.captured import Captured, Executed, capture


class Odd(torch.nn.Module):
    """Views of every kind, splits, operators in place, and a product that nobody needs."""

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
