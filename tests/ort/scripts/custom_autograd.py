"""Trains through a torch.autograd.Function, and refuses it with `--ort_custom_autograd false`."""

import torch

from optimum_memopt import UnsupportedModelError
from tests.gradients import assert_same_step
from tests.ort.helpers import MLM, optimize


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return Tripled.apply(self.linear(x)).sum()


refused, trained, off = Model(), Model(), MLM.build()
engines = optimize(refused, ort_custom_autograd=False), optimize(trained), optimize(off, ort_custom_autograd=False)
for _ in range(2):
    try:
        refused(torch.ones(2, 3))
    except UnsupportedModelError as error:
        assert str(error).endswith(
            "torch extensions; leave out --ort_custom_autograd false, or give --memory_opt_engine compile"
        ), error
    else:
        raise AssertionError("trained with an inlined function")
trained(torch.ones(2, 3)).backward()
assert torch.equal(trained.linear.bias.grad, torch.full((3,), 6.0))
assert_same_step(off, MLM.build(), MLM.batch())
