"""Grad mode and autocast set within a model's forward, with the model as one graph and by layers."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn

from optimum_memopt import optimize
from tests.rotation import in_turn

WIDTH = 16
COMPILE = {"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class InModes(nn.Module):
    """Six layers, two of which run in a different mode; their dropout needs different graphs in evaluation mode."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def around(self) -> contextlib.AbstractContextManager[Any]:
        if self.mode == "no grad":
            return torch.no_grad()
        if self.mode == "inference":
            return torch.inference_mode()
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.mode == "autocast")

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with self.around():
            for layer in self.layers[:2]:
                x = layer(x.float())
        # The backward cannot read an inference-mode tensor.
        x = x.clone()
        for layer in self.layers[2:]:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float(), labels)


def steps(model: nn.Module, is_outer: bool) -> list[list[torch.Tensor | None]]:
    """Returns the loss and gradients of each step; one step is in evaluation mode."""
    found = []
    for step, (rows, trains) in enumerate([(6, True), (9, True), (6, False), (6, True)]):
        torch.manual_seed(step)
        x, labels = torch.randn(rows, WIDTH), torch.randint(0, 4, (rows,))
        outer = torch.autocast("cpu", dtype=torch.bfloat16) if is_outer else contextlib.nullcontext()
        with outer:
            loss = model.train(trains)(x, labels)
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in model.parameters())])
        model.zero_grad()
    return found


@in_turn
@pytest.mark.parametrize("unit", ["auto", "model"])
@pytest.mark.parametrize("is_outer", [False, True], ids=["", "in autocast"])
@pytest.mark.parametrize("mode", ["no grad", "inference", "autocast", "autocast off"])
def test_gradients_are_bitwise_those_of_plain_pytorch(mode: str, is_outer: bool, unit: str) -> None:
    torch.manual_seed(0)
    model = InModes(mode)
    plain = copy.deepcopy(model)
    engine = optimize(model, memory_opt_level=1, memory_opt_unit=unit, **COMPILE)
    for ours, theirs in zip(steps(model, is_outer), steps(plain, is_outer), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    engine.detach()
