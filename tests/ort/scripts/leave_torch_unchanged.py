"""Trains, and checks that torch, its exporter and the environment are unchanged."""

import io
import os
import sys

import torch
import torch._dynamo  # Importing it replaces torch.manual_seed.
import torch.utils.checkpoint

from optimum_memopt.engines.api.run import Selection
from tests.ort.helpers import train


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 3)

    def forward(self, ids):
        return torch.nn.functional.gelu(self.linear(self.embedding(ids)))


small = Small()


def exported():
    file = io.BytesIO()
    torch.onnx.export(small, (torch.arange(6),), file, dynamo=False, opset_version=17)
    return file.getvalue()


originals = torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint
before = exported()
engine = train("vit", Selection(level=1))
for _ in range(2):
    assert (torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint) == originals
    assert exported() == before
    assert not [name for name in os.environ if name.startswith("ORTMODULE_")]
    assert not {"torch.onnx._internal.jit_utils", "torch.onnx._type_utils", "torch.onnx._globals"} & set(sys.modules)
    assert not hasattr(torch.onnx.symbolic_opset9, "_convolution")
    assert {name for name in sys.modules if sys.modules[name] is None and "deepspeed" in name} == set()
    engine.detach()
