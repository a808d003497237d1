"""Masks from seeds, alone and under plans that recompute them."""

import pytest
import torch

from optimum_memopt.engines.compile.compat_graph import is_random
from optimum_memopt.engines.compile.engine import CompileEngine
from optimum_memopt.engines.compile.passes.dropout import drop, keep_mask, seeded_dropout
from tests.engines.compile.compiled import DROPOUT, GPT2_DROPOUT, assert_bitwise_same, run, selection
from tests.model_zoo import ZOO
from tests.tiers import tiered

CPU = torch.device("cpu")
SEED = torch.tensor([2**62 + 12345])
# Dropouts run again from their masks, masks from their seeds.
PLANS = ("Dropout+:1:-1", "level 1", "level 2")


def draw() -> int:
    return int(torch.randint(0, 2**62, (1,)))


def mask(*size: int, seed: torch.Tensor = SEED, keep: float = 0.9) -> torch.Tensor:
    return keep_mask(list(size), seed, keep, CPU)


def test_a_mask_is_a_function_of_its_seed():
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    first = mask(64, 33)
    assert draw() == expected, "the global generator was read"
    assert first.dtype == torch.bool and first.shape == (64, 33)
    assert torch.equal(mask(64, 33), first)
    assert not torch.equal(mask(64, 33, seed=SEED + 1), first)
    torch.library.opcheck(keep_mask, ([4, 5], SEED, 0.5, CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropping_is_a_product_with_the_mask(dtype):
    x = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for laid_out in (x, x.transpose(0, 2), x[:1].expand(4, 5, 3)):
        kept = mask(*laid_out.shape, keep=0.6)
        assert torch.equal(drop(laid_out, kept, 1.25), laid_out * kept * 1.25)
        torch.library.opcheck(drop, (laid_out, kept, 1.25))


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.9, 0.999])
def test_masks_keep_the_fraction_that_they_should(keep):
    size = 400_000
    seeds = [torch.tensor([seed]) for seed in (0, 1, 2**63 - 2)]
    kept = [float(mask(size, seed=seed, keep=keep).float().mean()) for seed in seeds]
    sigma = (keep * (1 - keep) / size) ** 0.5
    assert all(abs(fraction - keep) < 4 * sigma for fraction in kept), kept


@pytest.mark.parametrize("p", [0.1, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dropout_is_atens_with_another_mask(p, dtype):
    x = torch.randn(500, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(1)
    output, kept = seeded_dropout(x, p, None)
    assert output.dtype == dtype
    torch.testing.assert_close(output, torch.where(kept, x / (1 - p), 0).to(dtype))
    _, others = torch.native_dropout(x, p, True)
    assert kept.dtype == others.dtype
    torch.testing.assert_close(kept.float().mean(), others.float().mean(), rtol=0, atol=0.03)
    assert not torch.equal(seeded_dropout(x, p, True)[1], kept), "the next one has a seed of its own"
    torch.manual_seed(1)
    assert torch.equal(seeded_dropout(x, p, True)[0], output)


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (1.0, True), (1.0, None), (0.4, False)])
def test_a_dropout_without_chance_draws_nothing(p, train):
    x = torch.randn(30, 4)
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    found = seeded_dropout(x, p, train)
    assert draw() == expected
    for ours, plain in zip(found, torch.native_dropout(x, p, train), strict=True):
        assert torch.equal(ours, plain) and ours.dtype == plain.dtype
        assert ours.data_ptr() != x.data_ptr()


class Dropouts(torch.nn.Module):
    """A dropout of each kind and probability between products; `output` is linear in `x` for given masks."""

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
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    engine.detach()


def test_the_backward_has_the_masks_of_the_forward():
    """By central differences, which are exact for a loss that is quadratic in `x`, as it is under masks that stay."""
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
    params=[("roberta-mlm", DROPOUT), pytest.param(("gpt2", GPT2_DROPOUT), marks=pytest.mark.slow)],
    ids=lambda case: case[0],
)
def case(request):
    """A model with dropout, micro-batches for it, and its step without a plan."""
    name, dropout = request.param
    model, batches = ZOO[name].build(**dropout), [ZOO[name].batch(8, 24, seed=seed) for seed in range(2)]
    return model, batches, run(model, "", *batches, seed=5), torch.get_rng_state()


@pytest.mark.end_to_end
@pytest.mark.parametrize("asked", tiered(PLANS, fast=PLANS[:1]))
def test_a_plan_changes_no_random_number(case, asked):
    model, batches, without_plan, state = case
    ours = run(model, asked, *batches, seed=5)
    assert_bitwise_same(ours, without_plan)
    assert torch.equal(torch.get_rng_state(), state), "what is drawn after the step is another"
    ours.split.check(ours.table)
    assert not any(is_random(node) for node in ours.split.backward.graph.nodes)
    forward, backward = ours.split.forward, ours.split.backward
    drawn = [node.name for node in forward.graph.nodes if is_random(node)]
    masks = [node.name for node in forward.graph.nodes if node.target is torch.ops.optimum_memopt.keep_mask.default]
    dropouts = sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
    assert len(drawn) == len(masks) > 0 and len(masks) >= dropouts - 1
    recomputed = {node.name for node in backward.graph.nodes} & set(masks)
    applied = {candidate.activation.root.name for candidate in ours.split.graph.choice.recomputed}
    assert recomputed and recomputed >= applied & set(masks)


@pytest.mark.end_to_end
def test_seeds_decide(case):
    model, (batch, _), without_plan, _ = case
    engine = CompileEngine(selection("level 1"), "aot_eager", dynamic=False)
    engine.attach(model)

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [float(model(**batch).loss) for _ in range(2)]

    first = losses(5)
    assert first == losses(5) and first[0] == without_plan.losses[0]
    assert not {*first} & {*losses(6)}
    assert first[0] != first[1], "two forwards have the same masks"
    model.eval()
    state = torch.get_rng_state()
    evaluated = [float(model(**batch).loss) for _ in range(2)]
    assert evaluated[0] == evaluated[1] and torch.equal(torch.get_rng_state(), state)
    model.train()
    engine.detach()
