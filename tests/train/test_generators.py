"""Random numbers in a forward are plain PyTorch's, for any generator and however often the forward runs."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from optimum_memopt import optimize
from optimum_memopt.generators import GeneratorStates
from tests.rotation import nightly
from tests.small_model import WIDTH, Block

STEPS = 3


def drawn_rows(count: int) -> numpy.ndarray:
    """Draw rows like SpecAugment's masks, in a loop whose length is random."""
    epsilon = numpy.random.rand(1).item()
    rows = numpy.zeros(count, dtype=bool)
    for _ in range(int(1 + 2 * epsilon)):
        rows[numpy.random.choice(count, 1)] = True
    return rows


class Noisy(torch.nn.Module):
    """Draws from a generator after its layers, with dropout after each layer."""

    def __init__(self, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(4)])
        self.drop, self.draw = torch.nn.Dropout(0.5), draw
        self.python, self.numpy = random.Random(7), numpy.random.default_rng(7)
        self.torch = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = self.drop(layer(x))
        return {"loss": (x * self.draw(self)).square().mean()}


def by_numpy(model: Noisy) -> Any:
    return torch.tensor(drawn_rows(WIDTH))


DRAWS: dict[str, Callable[[Any], Any]] = {
    "numpy in a loop": by_numpy,
    "numpy": lambda model: numpy.random.random(),
    "python": lambda model: random.random(),
    "python by another law": lambda model: random.gauss(1, 1),
    "own of python": lambda model: model.python.random(),
    "own of numpy": lambda model: model.numpy.random(),
    "own of torch": lambda model: torch.rand((), generator=model.torch),
}


def states() -> GeneratorStates:
    return GeneratorStates.of()


PLANS = {"level": {"memory_opt_level": 1}, "budget": {"memory_opt_budget": "4GiB"}}
IN_EACH_RUN = [("own of numpy", "level"), ("python", "budget")]


@pytest.mark.parametrize(
    ("draw", "plan"), nightly([(draw, plan) for draw in DRAWS for plan in PLANS], but=IN_EACH_RUN)
)
def test_numbers_are_those_of_plain_pytorch(draw: str, plan: str) -> None:
    """Random numbers are plain PyTorch's, also under a budget, whose first forward runs more than once."""
    torch.manual_seed(0)
    model = Noisy(DRAWS[draw])
    plain = copy.deepcopy(model)
    optimize(model, memory_opt_compiler="aot_eager", **PLANS[plan])
    for step in range(STEPS):
        x = torch.randn(3, 5, WIDTH)
        found = []
        for each in (model, plain):
            random.seed(step)
            numpy.random.seed(step)
            torch.manual_seed(step)
            loss = each(x)["loss"]
            loss.backward()
            found.append((loss.item(), states()))
        (loss, state), (expected, of_plain) = found
        assert loss == expected
        assert state.python == of_plain.python and state.cpu == of_plain.cpu
        assert all(numpy.array_equal(*pair) for pair in zip(state.numpy, of_plain.numpy, strict=True))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.python.getstate() == plain.python.getstate()
    assert model.numpy.bit_generator.state == plain.numpy.bit_generator.state
    assert torch.equal(model.torch.get_state(), plain.torch.get_state())


# Generators of a script, one of each library.
OF_SCRIPT = {"python": random.Random(), "numpy": numpy.random.default_rng(), "torch": torch.Generator()}


class NoisyLayer(torch.nn.Module):
    """Draws from a generator in a global variable, within a layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.block, self.name = Block(), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.name == "torch":
            return self.block(x) * torch.rand(x.shape, generator=OF_SCRIPT["torch"])
        return self.block(x) * OF_SCRIPT[self.name].random()


@pytest.mark.parametrize("plan", [{}, {"memory_opt_level": 1}], ids=str)
@pytest.mark.parametrize("name", OF_SCRIPT)
def test_a_generator_of_the_script_draws_once(name: str, plan: dict[str, int]) -> None:
    """Also if a forward that is traced by layers fails, and runs again as one graph."""
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*(NoisyLayer(name) for _ in range(4)))
    plain, x = copy.deepcopy(ours), torch.randn(3, WIDTH)
    optimize(ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", **plan)
    found = []
    for model in (plain, ours):
        OF_SCRIPT["torch"].manual_seed(0)
        OF_SCRIPT["python"].seed(0)
        OF_SCRIPT["numpy"].bit_generator.state = numpy.random.default_rng(0).bit_generator.state
        losses = [model(x).square().mean() for _ in range(STEPS)]
        found.append([loss.item() for loss in losses])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


class Branching(torch.nn.Module):
    """Drops more or less, by the sign of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        more, less = (functools.partial(torch.nn.functional.dropout, p=p) for p in (0.5, 0.3))
        return x + torch.cond(y.sum() > 0, lambda z: more(z), lambda z: less(z), (y,)).tanh()


@pytest.mark.parametrize("unit", ["layer", "model"])
def test_a_branch_that_draws_is_not_recomputed(unit: str) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*(Branching() for _ in range(4)))
    plain, x = copy.deepcopy(ours), torch.randn(3, WIDTH)
    optimize(
        ours, memory_opt_engine="compile", memory_opt_compiler="aot_eager", memory_opt_level=1, memory_opt_unit=unit
    )
    for model in (plain, ours):
        torch.manual_seed(1)
        model(x).square().mean().backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
