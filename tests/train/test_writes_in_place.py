"""Writes in place around layers: to what a layer returned, was given, or reads as state."""

import copy
from collections.abc import Callable

import pytest
import torch

from optimum_memopt import optimize
from tests.rotation import nightly
from tests.trainer_runs import log_lines

WIDTH, ROWS = 8, 5
COMPILE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager"}
PLANS = [{}, {"memory_opt_level": 1}, {"memory_opt_level": 1, "memory_opt_unit": "model"}]


class Masked(torch.nn.Module):
    """A layer that adds a mask to its input; its backward reads neither."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * self.scale) + mask


class Growing(torch.nn.Module):
    """Layers whose mask the loop between them changes."""

    def __init__(self, between: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.between = torch.nn.ModuleList(Masked() for _ in range(4)), between

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask, first = torch.zeros_like(x), None
        for layer in self.layers:
            x = layer(x, mask)
            self.between(x, mask)
            first = x.square().sum() if first is None else first
        return first, x.square().sum()


BETWEEN: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "mask": lambda x, mask: mask.add_(0.1),
    "view of the mask": lambda x, mask: mask[:2].mul_(0.5).sub_(0.1),
    "item": lambda x, mask: mask.__setitem__(0, 0.3),
    "result": lambda x, mask: x.mul_(0.9),
}


def step(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    _, loss = model(x)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("plan", nightly(PLANS, but=PLANS[1:2]), ids=str)
@pytest.mark.parametrize("between", BETWEEN)
def test_code_between_layers_may_write_to_what_they_were_given(between: str, plan: dict[str, object]) -> None:
    ours = Growing(BETWEEN[between])
    plain = copy.deepcopy(ours)
    optimize(ours, **COMPILE, **plan)
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH)
        for one, other in zip(step(ours, x), step(plain, x), strict=True):
            torch.testing.assert_close(one, other)


class Frozen(Masked):
    """The same with a frozen scale, from which the backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)


class Auxiliary(Growing):
    def __init__(self) -> None:
        super().__init__(lambda x, mask: None)
        self.layers = torch.nn.ModuleList(Frozen() for _ in range(4))


@pytest.mark.parametrize("unit", ["layer", "model"])
def test_state_that_changes_before_a_backward_of_some_layers_is_noticed(unit: str) -> None:
    """Only the loss of the first layer is differentiated, after a write to a weight that it was recomputed from."""
    ours = Auxiliary()
    plain = copy.deepcopy(ours)
    optimize(ours, **COMPILE, memory_opt_level=1, memory_opt_unit=unit)
    with log_lines() as lines:
        for number in range(8):
            gradients = []
            x = torch.randn(ROWS, WIDTH)
            for model in (ours, plain):
                model.zero_grad(set_to_none=True)
                first, last = model(x)
                if number >= 4:
                    with torch.no_grad():
                        # Hidden from autograd, which would raise an error in plain PyTorch.
                        model.layers[0].scale.data.mul_(-1.0)
                (first if number >= 4 else first + last).backward()
                gradients.append(model.layers[0].linear.weight.grad)
            # One backward reads the new values, and says so.
            if number != 4:
                torch.testing.assert_close(*gradients)
    assert sum("changed between a forward and its backward" in line for line in lines) <= 1


def test_a_batch_that_is_overwritten_before_the_backward_is_an_error() -> None:
    """As in plain PyTorch, also while the engine compares the state that a graph recomputes from."""

    class Squares(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Frozen() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.square()
            for layer in self.layers:
                h = layer(h * x, x)
            return h.square().mean()

    torch.manual_seed(0)
    ours = Squares()
    for model in (copy.deepcopy(ours), ours):
        if model is ours:
            optimize(model, **COMPILE, memory_opt_level=1)
        x = torch.randn(ROWS, WIDTH)
        loss = model(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            loss.backward()
