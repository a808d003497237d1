"""Models that ONNX Runtime cannot train: the fallback, and functions with their own backward."""

import copy
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import accumulate, assert_same_step
from tests.ort.helpers import (
    MLM,
    Attach,
    count_lines,
    needs_ort,
)

pytestmark = needs_ort


class Sorted(torch.nn.Module):
    """aten::histc has no ONNX symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values).square().mean() + torch.histc(values, bins=4).mean()


def test_fallback_is_said_once_and_stands_in_the_table(attach: Attach, lines: list[str]) -> None:
    model = Sorted()
    plain = copy.deepcopy(model)
    engine = attach(model, Selection(level=1), ort_fallback=True)
    values = torch.rand(3, 4)
    for _ in range(3):
        for trained in (model, plain):
            trained(values).backward()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert count_lines(lines, "NOT on ONNX Runtime") == 1
    assert "histc" in engine.plans().header[0]
    assert engine.plans().header[0] in engine.plans().to_text()
    assert engine.plans().plans == ()


def test_without_fallback_it_is_an_error_of_one_line(attach: Attach) -> None:
    model = Sorted()
    attach(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="ONNX Runtime cannot train Sorted: .*histc") as caught:
            model(torch.rand(3, 4))
        assert "\n" not in str(caught.value)


def test_an_error_in_the_users_batch_is_not_taken_for_an_unsupported_model(attach: Attach, lines: list[str]) -> None:
    model = MLM.build()
    plain = copy.deepcopy(model)
    attach(model, ort_fallback=True)
    accumulate(model, [MLM.batch()])
    wrong = MLM.batch()
    wrong["input_ids"] = wrong["input_ids"] + 1000
    with pytest.raises(IndexError, match="input_ids holds 10"):
        model(**wrong)
    assert count_lines(lines, "NOT on ONNX Runtime") == 0
    assert_same_step(model, plain, MLM.batch())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Adversarial(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(Reversed.apply(self.first(values)).tanh()).square().mean()


@pytest.mark.parametrize("fallback", [True, False])
def test_a_backward_of_its_own_is_never_lost(attach: Attach, fallback: bool) -> None:
    from optimum_memopt.engines.ort.compat.extensions import BUILD_COMMAND, find

    model = Adversarial()
    plain = copy.deepcopy(model)
    attach(model, ort_fallback=fallback)
    values = torch.rand(3, 4)
    if find() is None:
        with pytest.raises(UnsupportedModelError, match=f"Reversed.*{BUILD_COMMAND}"):
            model(values)
        return
    for trained in (model, plain):
        trained(values).backward()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)
