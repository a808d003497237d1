"""A stack of layers whose activations are cheap to recompute, for any number of rows and any length; traces fast."""

import torch
from transformers.modeling_outputs import MaskedLMOutput

from tests.gradients import Batch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)).tanh())


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, input_ids: torch.Tensor) -> MaskedLMOutput:
        for layer in self.layers:
            input_ids = layer(input_ids)
        return MaskedLMOutput(loss=input_ids.square().mean())


def tower_batch(rows: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    return {"input_ids": torch.randn(rows, length, 32, generator=generator)}
