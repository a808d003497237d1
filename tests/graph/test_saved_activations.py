"""Saved activations found by the analysis, against those that autograd saves."""

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.graph.candidates import recompute_chain
from optimum_memopt.engines.compile.graph.joint import is_view, root
from optimum_memopt.engines.compile.graph.problem import problem_of
from optimum_memopt.engines.compile.graph.saved_activations import (
    is_generator_state,
    is_negligible,
    is_statistic,
    layer_of,
    module_path,
    operator_name,
)
from optimum_memopt.engines.compile.solver.solver import Solver
from tests.captured import Captured, capture
from tests.model_zoo import ZOO


class Block(torch.nn.Module):
    """A layer whose saved activations are read through views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
        self.up = torch.nn.Linear(16, 24)
        self.down = torch.nn.Linear(24, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inner(x).view(*x.shape[:2], 2, 8).transpose(1, 2)
        weights = (heads @ heads.transpose(-1, -2)).softmax(-1)
        mixed = (weights @ heads).transpose(1, 2).flatten(2)
        return self.norm(x + self.down(functional.gelu(self.up(mixed))))


class Stack(torch.nn.Module):
    """The loss of two layers after an embedding whose weight is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(x, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), x


IDS = torch.arange(3 * 7).view(3, 7)


def saved_by_autograd(function, *args) -> list[int]:
    """Returns the bytes of each storage that eager autograd saves, without parameters and inputs."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*args)
    there = {one.untyped_storage().data_ptr() for one in (*function.parameters(), *args)}
    return sorted(one.untyped_storage().nbytes() for address, one in kept.items() if address not in there)


@pytest.fixture(scope="module")
def stack() -> Captured:
    torch.manual_seed(0)
    return capture(Stack().forward, IDS)


def made_by(captured: Captured, name: str) -> list:
    return [activation for activation in captured.activations if operator_name(activation.root) == name]


def test_saved_activations_are_the_storages_that_autograd_saves(stack):
    found = [int(activation.bytes.subs(stack.sizes)) for activation in stack.activations]
    # Eager saves the total weight of the loss, a scalar, which the graph reads too. Each product in a layer copies the
    # heads for itself; the graph has one copy.
    copies = [IDS.numel() * 16 * 4] * 2
    assert sorted([*found, *copies]) == saved_by_autograd(Stack(), IDS)


def test_a_real_models_saved_activations_are_the_storages_that_autograd_saves():
    """Sizes of tokens times features are equal; small ones, of masks and positions, differ."""
    case = ZOO["gpt2"]
    batch = case.batch()
    model = case.build(use_cache=False)
    model.loss_type = "ForCausalLM"
    plain = capture(model.forward, **batch)
    saved = saved_by_autograd(Keywords(model, batch))
    found = sorted(int(activation.bytes.subs(plain.sizes)) for activation in plain.activations)
    assert [size for size in found if size > 1000] == [size for size in saved if size > 1000]


class Keywords(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self):
        return self.model(**self.batch)


def test_parameters_are_no_saved_activations_not_even_where_two_modules_share_one(stack):
    assert all(activation.root.op == "call_function" for activation in stack.activations)
    weights = [node for node in stack.joint.inputs if node.users]
    assert {root(read) for activation in stack.activations for read in activation.reads}.isdisjoint(weights)


def test_all_views_of_a_storage_are_one_saved_activation():
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y.t().sin() + y.sum() + y[:, 1:4].t().cos().sum()).sum()

    captured = capture(function, torch.randn(5, 5, requires_grad=True))
    # The gradient of `exp` reads its output, the others each read a view of it.
    (activation,) = captured.activations
    assert [operator_name(read) for read in activation.reads] == ["detach", "t", "t"]
    assert all(is_view(read) for read in activation.reads)
    assert {root(read) for read in activation.reads} == {activation.root}


def test_saved_activations_come_in_graph_order(stack):
    roots = [activation.root for activation in stack.activations]
    assert len(set(roots)) == len(roots) > 15
    assert roots == sorted(roots, key=stack.joint.order.__getitem__)


def test_each_saved_activation_knows_its_module_and_layer(stack):
    assert [(module_path(activation.root), activation.layer) for activation in made_by(stack, "gelu")] == [
        ("layers.0", "layers.0"),
        ("layers.1", "layers.1"),
    ]
    assert [module_path(activation.root) for activation in made_by(stack, "addmm")] == ["layers.0.up", "layers.1.up"]
    (loss,) = made_by(stack, "_log_softmax")
    assert loss.layer == module_path(loss.root) == ""


class NotesItsInput(Stack):
    """Sets an attribute in its forward; dynamo then renames the modules that are read after it."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.last = ids
        return super().forward(ids)


def test_modules_of_a_model_that_changes_itself_have_their_paths():
    assert [activation.layer for activation in made_by(capture(NotesItsInput().forward, IDS), "gelu")] == [
        "layers.0",
        "layers.1",
    ]


def test_every_operator_of_a_forward_comes_from_a_call(roberta, gpt2):
    """No operator is created by torch from a model's scalars, which would belong to no module."""
    for captured in (roberta, gpt2):
        assert [node for node in captured.joint.forward if node.meta.get("seq_nr") is None] == []


def test_layers_of_transformers_are_found(roberta, gpt2):
    assert {activation.layer for activation in roberta.activations} == {
        "",
        "roberta.encoder.layer.0",
        "roberta.encoder.layer.1",
    }
    assert {activation.layer for activation in gpt2.activations} == {"", "transformer.h.0", "transformer.h.1"}


def test_a_layer_that_is_called_twice_is_two(albert):
    first, second = sorted({activation.layer for activation in albert.activations} - {""})
    assert second == f"{first}@1"
    counts = [sum(activation.layer == layer for activation in albert.activations) for layer in (first, second)]
    assert counts[0] == counts[1] > 10


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU(), torch.nn.Linear(24, 16))


class Wrapped(torch.nn.Module):
    """A model of lists without known names, run one after the other."""

    def __init__(self, **lists: torch.nn.Module) -> None:
        super().__init__()
        for name, one in lists.items():
            setattr(self, name, one)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.children():
            for item in one if isinstance(one, torch.nn.ModuleList) else (one,):
                x = item(x)
        return x.square().sum()


def blocks(count: int = 2) -> list[torch.nn.Module]:
    return [Block() for _ in range(count)]


@pytest.mark.parametrize(
    "model, layers",
    [
        (Wrapped(net=torch.nn.Sequential(*blocks())), ["net.0", "net.1"]),
        (Wrapped(encoders=torch.nn.ModuleList(blocks())), ["encoders.0", "encoders.1"]),
        # The repeating list counts, not the one around it; a Sequential of other modules is not equal to it.
        pytest.param(
            Wrapped(all=torch.nn.Sequential(torch.nn.Sequential(*blocks(3)), torch.nn.Sequential(torch.nn.Tanh()))),
            ["all.0.0", "all.0.1", "all.0.2"],
            marks=pytest.mark.nightly,
        ),
        # Outermost: an MLP within a layer is not a layer.
        (Wrapped(net=torch.nn.Sequential(mlp(), mlp())), ["net.0", "net.1"]),
        pytest.param(
            Wrapped(net=torch.nn.Sequential(*blocks()), top=torch.nn.Sequential(torch.nn.Tanh())),
            ["net.0", "net.1"],
            marks=pytest.mark.nightly,
        ),
        # If a list has a known name, no other list counts.
        (Wrapped(stem=mlp(), layers=torch.nn.ModuleList(blocks())), ["layers.0", "layers.1"]),
        (Wrapped(stem=torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())), []),
    ],
)
def test_layers_are_the_items_of_the_outermost_list_that_repeats(model, layers):
    captured = capture(model.forward, torch.randn(3, 7, 16, requires_grad=True))
    assert sorted({activation.layer for activation in captured.activations} - {""}) == layers
    assert {layer_of(node) for node in captured.joint.backward} - {""} == set(layers)
    # Recomputed copies have the layers, too.
    assert {layer_of(node) for node in captured.split("level 1").backward.graph.nodes} - {""} == set(layers)


@pytest.mark.nightly
def test_a_level_and_a_budget_recompute_in_a_sequential_what_they_do_in_a_list_called_layers():
    named, other = (
        capture(Wrapped(**{name: kind}).forward, torch.randn(40, 7, 16, requires_grad=True))
        for name, kind in (("layers", torch.nn.ModuleList(blocks(6))), ("net", torch.nn.Sequential(*blocks(6))))
    )
    saved = [len(one.choose("level 1").nodes_to_save) for one in (named, other)]
    assert saved[0] == saved[1] < len(other.activations) / 2
    named, other = (Solver(problem_of(one.graph, [1.0] * len(one.joint.nodes))) for one in (named, other))
    assert other.lowest.peak == named.lowest.peak and other.everything.peak == named.everything.peak


def test_what_the_forward_returns_is_marked(stack):
    (returned,) = [activation for activation in stack.activations if activation.is_returned]
    assert operator_name(returned.root) == "native_layer_norm" and returned.layer == "layers.1"


def test_what_the_next_layer_reads_leaves_its_layer(stack):
    leaving = [activation for activation in stack.activations if activation.layer and activation.leaves_layer]
    assert [(operator_name(activation.root), activation.layer) for activation in leaving] == [
        ("native_layer_norm", "layers.0"),
        ("native_layer_norm", "layers.1"),
    ]


def test_a_recompute_chain_reaches_to_what_stays_saved_and_no_further(stack):
    available = {activation.root for activation in stack.activations}
    gelu = made_by(stack, "gelu")[1]
    near = recompute_chain(stack.joint, gelu, available)
    assert [operator_name(node) for node in near.nodes if not is_view(node)] == ["gelu"]
    assert [operator_name(node) for node in near.reads] == ["addmm"]
    far = recompute_chain(stack.joint, gelu, available - set(near.reads))
    assert "addmm" in [operator_name(node) for node in far.nodes]
    assert near.saving == far.saving == gelu.bytes
    everything = recompute_chain(stack.joint, gelu, {gelu.root})
    assert {node.op for node in everything.reads} == {"placeholder"}
    assert layer_of(everything.nodes[-1]) == "layers.1" and "layers.0" in map(layer_of, everything.nodes)


def test_statistics_are_never_recomputed(roberta):
    available = {activation.root for activation in roberta.activations}
    statistics = [activation for activation in roberta.activations if is_statistic(activation.root)]
    assert len(statistics) == 10, "mean and deviation of five norms"
    assert all(recompute_chain(roberta.joint, activation, available) is None for activation in statistics)


def test_the_generators_state_is_saved_and_no_mask_is_drawn_twice(roberta):
    masks = made_by(roberta, "keep_mask")
    assert len(masks) == 9
    for mask in masks:
        chain = recompute_chain(
            roberta.joint, mask, {activation.root for activation in roberta.activations} - {mask.root}
        )
        assert [operator_name(node) for node in chain.nodes] == ["keep_mask"]
        assert [is_generator_state(node) for node in chain.extra_saved] == [True]
        assert chain.saving == mask.bytes and not chain.is_compromise


def test_negligible_sizes_are_small_and_of_one_size(stack):
    symbol = next(iter(stack.sizes))
    assert is_negligible(symbol * 0 + 4095) and not is_negligible(symbol * 0 + 4096) and not is_negligible(symbol)
