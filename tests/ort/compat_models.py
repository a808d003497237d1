"""Models that need the patches of `ort/compat`, trained for one step without the engine."""

import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.engines.ort.session.session import OrtSession


def train(model, batch):
    session = OrtSession(model, OrtOptions(ort_fallback=False), Selection())
    session.forward(batch).pow(2).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    return session


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 4)

    def forward(self, ids):
        return self.linear(self.embedding(ids)).softmax(-1)


class Image(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 4, 2, stride=2)
        self.same = torch.nn.Conv2d(4, 4, 3, padding="same")

    def forward(self, pixels):
        return self.same(self.patches(pixels)).flatten(2).transpose(1, 2)


class Twice(torch.autograd.Function):
    """A function whose gradient shows that its own backward ran."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Custom(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, x):
        return Twice.apply(self.linear(x))


def words():
    return train(Words(), torch.arange(10).reshape(2, 5))


def image():
    return train(Image(), torch.rand(2, 3, 8, 8))


def custom():
    return train(Custom(), torch.rand(2, 3))
