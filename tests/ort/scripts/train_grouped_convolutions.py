"""Trains grouped convolutions; without the patch the process crashes."""

import copy

import pytest
import torch

from optimum_memopt import UnsupportedModelError
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options import OrtOptions
from tests.gradients import assert_same_step
from tests.model_zoo import _BERT, Case, masked_lm


def attached(model, selection=None):
    plain = copy.deepcopy(model)
    OrtEngine(selection, OrtOptions(ort_fallback=False)).attach(model)
    return model, plain


class Convolved(torch.nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.convolution = convolution

    def forward(self, values):
        return self.convolution(values).square().mean()


conv1d, depthwise = torch.nn.Conv1d, {"groups": 8, "bias": False}
for convolution in (
    conv1d(8, 8, 3, padding=1, groups=8),
    conv1d(8, 16, 4, stride=2, padding=3, groups=2),
    conv1d(8, 8, 3, dilation=2, **depthwise),
):
    ours, plain = attached(Convolved(convolution))
    for shape in ((4, 8, 12), (2, 8, 33)):
        values = torch.rand(shape)
        leaves = [values.clone().requires_grad_() for _ in range(2)]
        for model, leaf in zip((ours, plain), leaves, strict=True):
            model.zero_grad()
            model(leaf).backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad)

volume, _ = attached(Convolved(torch.nn.Conv3d(4, 4, 3, padding=1, groups=2)))
with pytest.raises(UnsupportedModelError, match="grouped convolution over 3 dimensions writes out of bounds"):
    volume(torch.rand(2, 4, 5, 5, 5, requires_grad=True))

case = Case("ConvBertForMaskedLM", "ConvBertConfig", {**_BERT, "embedding_size": 16, "head_ratio": 1}, masked_lm)
ours, plain = attached(case.build(), Selection(level=1))
assert_same_step(ours, plain, case.batch(), case.batch(3, 7, seed=1))
