"""Forwards whose gradients or values ONNX Runtime would get wrong are refused; similar ones train."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from optimum_memopt import MemOptError, optimize

WIDTH = 8
ORT = {"memory_opt_engine": "ort", "ort_fallback": False}
Compute = Callable[["Two", torch.Tensor], torch.Tensor]


class Two(torch.nn.Module):
    """Two linear layers, combined by a function."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.compute = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH), compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)


def without_gradients(model: Two, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        features = model.first(x)
    return model.second(features).square().mean()


@torch.no_grad()
def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max()


def straight_through(model: Two, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    return model.second(x + (x.round() - x).detach()).square().mean()


CUT: dict[str, Compute] = {
    "detach": lambda model, x: functional.mse_loss(model.second(model.first(x)), model.first(x).detach()),
    "data": lambda model, x: (model.first(x) * model.first(x).data).mean(),
    "no_grad": without_gradients,
    "decorated": lambda model, x: model.first(x).square().mean() / largest(model.first(x)),
    "straight through": straight_through,
}
READ: dict[str, Compute] = {
    "item": lambda model, x: (model.first(x) / x.abs().max().item()).square().mean(),
    "condition": lambda model, x: model.first(x).square().mean() if x.sum() > 0 else model.second(x).mean(),
    "int": lambda model, x: model.first(x)[: int((x[:, 0] > 0).sum()) + 1].square().mean(),
    "tolist": lambda model, x: model.first(x).square().mean() * x[0].tolist()[0],
    "len": lambda model, x: model.first(x).sum() / len(x),
}
# What looks alike, and is right.
RIGHT: dict[str, Compute] = {
    "sizes": lambda model, x: model.first(x).square().sum() / x.shape[0] / x.size(1) / x.numel(),
    "comparison of sizes": lambda model, x: model.first(x).square().mean() * (2 if x.shape[1] > 4 else 1),
    "detached batch": lambda model, x: model.first(x.detach()).square().mean(),
    "mask": lambda model, x: model.first(x).masked_fill(model.first(x).detach() > 0, 0.0).square().mean(),
    "mask as numbers": lambda model, x: (model.first(x) * (model.first(x).detach() > 0).float()).square().mean(),
}


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        *((each, "an output depends on a trained tensor by detach, .data or torch.no_grad") for each in CUT.values()),
        *((each, "it reads the value of a tensor") for each in READ.values()),
    ],
    ids=[*CUT, *READ],
)
def test_what_would_be_wrong_is_refused(compute: Compute, reason: str) -> None:
    model = Two(compute)
    optimize(model, **ORT)
    with pytest.raises(MemOptError, match=f"ONNX Runtime cannot train Two: {reason}"):
        model(torch.randn(4, WIDTH))
    assert torch.no_grad.__enter__.__module__ == "torch.autograd.grad_mode"


class Counted(Two):
    """Reads a number that it is given."""

    def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        for _ in range(int(number)):
            x = self.first(x)
        return self.second(x).square().mean()


@pytest.mark.parametrize("number", [2, 2.0, torch.tensor(2)], ids=str)
def test_a_number_that_decides_what_runs_is_refused(number: Any) -> None:
    """The graph would keep the first batch's number, without a word."""
    model = Counted(lambda *_: torch.zeros(()))
    optimize(model, **ORT)
    with pytest.raises(MemOptError, match="it reads the value of a tensor"):
        model(torch.randn(4, WIDTH), number)


def test_a_fallback_draws_the_random_numbers_of_plain_pytorch() -> None:
    """The failed export has run the forward once."""
    ours = Two(lambda model, x: functional.dropout(model.first(x)).square().mean() / float(x.abs().max()))
    plain = copy.deepcopy(ours)
    optimize(ours, memory_opt_level=1, memory_opt_engine="ort", ort_fallback=True)
    x, drawn = torch.randn(4, WIDTH), []
    for model in (ours, plain):
        torch.manual_seed(1)
        drawn.append([*(model(x).item() for _ in range(2)), torch.rand(()).item()])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("compute", RIGHT.values(), ids=RIGHT)
def test_what_looks_alike_trains(compute: Compute) -> None:
    ours = Two(compute)
    plain = copy.deepcopy(ours)
    optimize(ours, **ORT)
    for rows in (4, 6):
        x: Any = torch.randn(rows, WIDTH)
        losses = [model(x) for model in (ours, plain)]
        for model, loss in zip((ours, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(ours.first.weight.grad, plain.first.weight.grad)


def test_auto_goes_on_with_the_compile_engine() -> None:
    ours = Two(without_gradients)
    plain = copy.deepcopy(ours)
    engine = optimize(ours)
    x = torch.randn(4, WIDTH)
    for model in (ours, plain):
        model(x).backward()
    assert engine.plans().engine == "compile"
    assert ours.first.weight.grad is None
    torch.testing.assert_close(ours.second.weight.grad, plain.second.weight.grad)
