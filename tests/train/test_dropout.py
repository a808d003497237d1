"""Dropout, alone and under plans that recompute its masks, against plain PyTorch."""

import pytest
import torch

from optimum_memopt.engines.compile.partition.dropout import draw_mask, drop, keep_mask, pure_dropout
from optimum_memopt.engines.compile.train.engine import CompileEngine
from optimum_memopt.engines.shared.forward_patch import without_key_value_cache
from optimum_memopt.engines.torch_compat.fx_graph import is_random
from tests.compiled import DROPOUT, GPT2_DROPOUT, run, selection
from tests.gradients import accumulate, assert_bitwise_same
from tests.model_zoo import ZOO
from tests.rotation import in_turn, nightly

CPU = torch.device("cpu")
# Plans that recompute dropouts from their masks, and masks from the generator's states.
PLANS = ("Dropout+:1:-1", "level 1", "level 2")
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 0, 2),
    "expanded": lambda x: x[:1].expand(64, 48, 33),
    "strided": lambda x: x[:, ::2],
    "small": lambda x: x[:5, :3],
}


def draw() -> int:
    return int(torch.randint(0, 2**62, (1,)))


def test_a_mask_is_a_function_of_the_state_that_it_was_drawn_from():
    torch.manual_seed(0)
    arguments, token = ([64, 33], [0, 1]), torch.empty(0)
    state, drawn = draw_mask(token, *arguments, 0.9, CPU)
    after = draw()
    assert torch.equal(keep_mask(*arguments, state, 0.9, CPU), drawn)
    assert not torch.equal(draw_mask(token, *arguments, 0.9, CPU)[1], drawn), "the next one is another"
    torch.set_rng_state(state)
    assert torch.equal(draw_mask(token, *arguments, 0.9, CPU)[1], drawn)
    assert draw() == after, "a mask that is computed once more reads the generator"
    torch.library.opcheck(keep_mask, ([4, 5], [1, 0], state, 0.5, CPU))
    # Its results differ from call to call.
    torch.library.opcheck(draw_mask, (token, [4, 5], [1, 0], 0.5, CPU), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.7, 0.123456])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_dropout_is_plain_pytorchs_to_the_bit(layout, dtype, p):
    """A dropout is bitwise plain PyTorch's, including signs of zeros, infinities and the generator's next numbers."""
    x = torch.randn(64, 48, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, :2] = torch.tensor([torch.inf, torch.nan])
    x = LAYOUTS[layout](x).detach().requires_grad_()
    torch.manual_seed(1)
    expected = torch.nn.functional.dropout(x, p)
    after = draw()
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    (expected_gradient,) = torch.autograd.grad(expected, x, gradient)
    torch.manual_seed(1)
    output, mask = pure_dropout(x.detach(), p, True)
    assert draw() == after
    assert_same_bits(output, expected.detach())
    assert_same_bits(drop(gradient, mask, 1 - p), expected_gradient)
    torch.library.opcheck(drop, (x.detach(), mask, 1 - p), test_utils=("test_schema", "test_faketensor"))


def assert_same_bits(ours, expected):
    assert ours.stride() == expected.stride()
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~ours.isnan()
    assert torch.equal(ours.signbit()[numbers], expected.signbit()[numbers])


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (1.0, None), (0.4, False)])
def test_a_dropout_without_chance_draws_nothing(p, train):
    x = torch.randn(30, 4)
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    found = pure_dropout(x, p, train)
    assert draw() == expected
    for ours, plain in zip(found, torch.native_dropout(x, p, train), strict=True):
        assert torch.equal(ours, plain) and ours.dtype == plain.dtype
        assert ours.data_ptr() != x.data_ptr()


class Dropouts(torch.nn.Module):
    """Dropouts with a given probability after linear layers; `output` is linear in `x` for given masks."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(3))
        self.dropouts = torch.nn.ModuleList([torch.nn.Dropout(p), torch.nn.Dropout(p), torch.nn.Dropout(p)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer, dropout in zip(self.layers, self.dropouts, strict=True):
            x = dropout(layer(x))
        return {"loss": x.square().sum(), "output": x}


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_compiled_without_chance(p):
    model, x = Dropouts(p), torch.randn(64, 32)
    expected = model(x)
    expected["loss"].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    engine = CompileEngine(compiler="aot_eager", dynamic=False)
    engine.attach(model)
    state = torch.get_rng_state()
    ours = model(x)
    ours["loss"].backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(ours["output"], expected["output"])
    assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), gradients, strict=True))
    engine.detach()


def test_the_backward_has_the_masks_of_the_forward():
    """The backward uses the forward's masks: the loss is quadratic in `x`, so central differences are exact."""
    model = Dropouts(0.3).double()
    x = torch.randn(256, 32, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    engine = CompileEngine(compiler="aot_eager", dynamic=False)
    engine.attach(model)

    def loss(at: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(9)
        return model(at)["loss"]

    for asked in ("", "FusedMatMul+Dropout+:1:-1"):
        engine.apply(selection(asked))
        (gradient,) = torch.autograd.grad(loss(x), x)
        assert bool(engine.plans().enabled) == bool(asked)
        above, below = ((x + sign * direction).detach().requires_grad_() for sign in (1, -1))
        difference = (loss(above) - loss(below)).detach() / 2
        torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-9, atol=0)
    engine.detach()


@pytest.fixture(
    scope="module",
    params=[("roberta-mlm", DROPOUT), pytest.param(("gpt2", GPT2_DROPOUT), marks=pytest.mark.nightly)],
    ids=lambda case: case[0],
)
def case(request):
    """Returns a model with dropout, micro-batches, plain PyTorch's step, and the generator's state after it."""
    name, dropout = request.param
    model, batches = ZOO[name].build(**dropout), [ZOO[name].batch(8, 24, seed=seed) for seed in range(2)]
    # The engine disables key-value caches, see `test_matrix.py`.
    batches = [without_key_value_cache(model, (), batch) for batch in batches]
    torch.manual_seed(5)
    return model, batches, accumulate(model, batches), torch.get_rng_state()


@pytest.mark.parametrize("asked", ["", *nightly(PLANS, but=PLANS[:1])])
def test_a_plan_changes_no_random_number(case, asked):
    """Loss, gradients and the generator's state after the step are plain PyTorch's under every plan."""
    model, batches, plain, state = case
    ours = run(model, asked, *batches, seed=5)
    assert_bitwise_same(ours.step, plain)
    assert torch.equal(torch.get_rng_state(), state), "what is drawn after the step is another"
    if not asked:
        return
    ours.split.check(ours.table)
    forward, backward = ours.split.forward, ours.split.backward
    assert not any(is_random(node) for node in backward.graph.nodes)
    drawn = [node for node in forward.graph.nodes if is_random(node)]
    masks = {node.name for one in drawn for node in one.users if node.args[1] == 1}
    dropouts = sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
    assert len(drawn) == len(masks) >= dropouts - 1 > 0
    keep = torch.ops.optimum_memopt.keep_mask.default
    assert not forward.graph.find_nodes(op="call_function", target=keep), "a mask is drawn, and computed once more"
    recomputed = {node.name for node in backward.graph.find_nodes(op="call_function", target=keep)}
    applied = {candidate.activation.root.name for candidate in ours.split.graph.choice.recomputed}
    assert recomputed and masks >= recomputed >= applied & masks


class Unread(torch.nn.Module):
    """A model with unused dropouts in and after its layers, as in CANINE, whose classifier ignores some character
    states."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = torch.nn.Linear(32, 32), torch.nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.dropout(self.linear(x).relu())
            self.dropout(x.exp())
            return x

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        loss = self.layers[0].dropout(x).square().mean()
        torch.rand_like(x)
        return {"loss": loss}


@in_turn
@pytest.mark.parametrize("asked", ["", "level 1"])
def test_random_numbers_that_nobody_reads_are_drawn_all_the_same(asked):
    model, x = Unread(), torch.randn(512, 32)
    steps = []
    for engine in (None, CompileEngine(selection(asked), "aot_eager")):
        if engine is not None:
            engine.attach(model)
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(x=x)["loss"]
        loss.backward()
        steps.append([loss.detach(), torch.get_rng_state(), *(each.grad for each in model.parameters())])
    assert " graphs for 4 layers" in engine.plans().header[0] and bool(engine.plans().enabled) == bool(asked)
    engine.detach()
    assert all(map(torch.equal, *steps))


@pytest.mark.nightly
def test_another_seed_is_another_step(case):
    model, (batch, _), plain, _ = case
    engine = CompileEngine(selection("level 1"), "aot_eager", dynamic=False)
    engine.attach(model)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(model(**batch).loss) for _ in range(2)]

    first = losses(5)
    assert first == losses(5) and first[0] == plain[0][0]
    assert not {*first} & {*losses(6)}
    assert first[0] != first[1], "two forwards have the same masks"
    model.eval()
    state = torch.get_rng_state()
    evaluated = [float(model(**batch).loss) for _ in range(2)]
    assert evaluated[0] == evaluated[1] and torch.equal(torch.get_rng_state(), state)
    model.train()
    engine.detach()
