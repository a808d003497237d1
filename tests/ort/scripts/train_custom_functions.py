"""Trains a model with the torch.autograd.Function named by the argument; with `pending`, exits before its backward.

The gradients cannot be derived from the forwards: if a function were inlined, they would differ.
"""

import copy
import gc
import sys

import torch

from tests.ort.helpers import optimize


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + 1

    @staticmethod
    def backward(ctx, first, second):
        x, w = ctx.saved_tensors
        return 7 * first * w + second, (3 * first * x).sum(0)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return 5 * gradient


class UnusedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, used, unused):
        assert unused.shape == used.shape and not unused.any()
        return 4 * used


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.before, self.after = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, x):
        return self.after(self.function(self.before(x), self.weight)).pow(2).mean()


FUNCTIONS = {
    "two_outputs": lambda x, w: sum(TwoOutputs.apply(x, w)),
    "in_place": lambda x, w: InPlace.apply(x * w),
    "unused_output": lambda x, w: UnusedOutput.apply(x * w)[0],
}


def contexts():
    gc.collect()
    return [node for node in gc.get_objects() if type(node).__name__ in ("TwoOutputsBackward", "InPlaceBackward")]


def train(name):
    torch.manual_seed(0)
    model = Model(FUNCTIONS[name])
    reference = copy.deepcopy(model)
    engine = optimize(model)
    for rows in (3, 3, 5, 1):
        batch = torch.randn(rows, 4)
        for trained in (model, reference):
            trained.zero_grad()
        loss, expected = model(batch), reference(batch)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for ours, expected_parameter in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected_parameter.grad, rtol=1e-5, atol=1e-6)
        del loss, expected
        assert not contexts()
    return engine


name, *pending = sys.argv[1:]
engine = train(name)
if pending:
    model = Model(FUNCTIONS[name])
    optimize(model)
    outputs = model(torch.randn(2, 4))
