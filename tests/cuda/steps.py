"""Training steps on a CUDA device, and the statistics of torch's allocator."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpu.steps import MODELS, Shape, batch_of, outputs_of

import optimum_memopt

_LAYERS = Shape(layers=2, hidden=768, heads=12, intermediate=3072, vocabulary=8192, batch=8, length=256)
_DROPOUT = 0.1


def model_of(name: str) -> torch.nn.Module:
    """Returns two layers of a model of gpu/steps.py, on the CPU."""
    return MODELS[name](_LAYERS, _DROPOUT)


@dataclass(frozen=True)
class Held:
    """Bytes at the peak of a step: of tensors, their blocks and the device; of tensors beyond those before it."""

    requested: int
    allocated: int
    reserved: int
    activations: int


@dataclass
class Training:
    """A model on a CUDA device, under the compile engine or, if that is None, plain PyTorch."""

    model: torch.nn.Module
    engine: Any
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    dtype: str
    holds_outputs: bool = False
    outputs: Any = None
    loss_of: Callable[[Any], torch.Tensor] = operator.attrgetter("loss")

    def step(self) -> Held:
        """Run one step, with nothing left of its loss."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = _requested("current")
        outputs = outputs_of(self.model, self.batch, self.dtype)
        loss = self.loss_of(outputs)
        if self.holds_outputs:
            self.outputs = outputs
        del outputs
        loss.backward()
        del loss
        activations = _requested("peak") - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Held(_requested("peak"), *peaks, activations)


def training(name: str, dtype: str, **options: Any) -> Training:
    """Returns `model_of` on the device, with a batch; `options` belong to the compile engine."""
    torch.manual_seed(0)
    model = model_of(name).cuda().train()
    engine, optimizer = None, torch.optim.AdamW(model.parameters(), fused=True)
    given = optimizer if options.get("memory_opt_release_gradients") else None
    if options:
        # The stand-in finds no labels, so a chunked loss would compute nothing.
        options = {"memory_opt_loss": "plain", "memory_opt_compiler": "aot_eager", **options}
        engine = optimum_memopt.optimize(model, optimizer=given, memory_opt_engine="compile", **options)
        engine.outputs_read_by = lambda: ""
    return Training(model, engine, optimizer, batch_of(_LAYERS), dtype)


def _requested(kind: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]
