import copy
from typing import Any

import pytest
import torch

from optimum_memopt import MemOptError, optimize
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.session.session import one_line
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import accumulate, assert_same_step
from tests.model_zoo import ZOO
from tests.ort.helpers import MLM, ROBERTA, Attach, Pair, count_lines, needs_ort
from tests.rotation import nightly

pytestmark = needs_ort


class Sorted(torch.nn.Module):
    """Uses aten::histc, which has no ONNX symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values).square().mean() + torch.histc(values, bins=4).mean()


def test_fallback_is_said_once_and_stands_in_the_table(pair: Pair, lines: list[str]) -> None:
    model, plain, engine = pair(Sorted(), Selection(level=1), ort_fallback=True)
    values = torch.rand(3, 4)
    for _ in range(3):
        for trained in (model, plain):
            trained(values).backward()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert count_lines(lines, "NOT on ONNX Runtime") == 1
    assert "histc" in engine.plans().header[0]
    assert engine.plans().header[0] in engine.plans().to_text()
    assert engine.plans().plans == ()


def test_without_fallback_it_is_an_error_of_one_line(attach: Attach, capfd: pytest.CaptureFixture[str]) -> None:
    model = Sorted()
    attach(model)
    capfd.readouterr()
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="ONNX Runtime cannot train Sorted: .*histc") as caught:
            model(torch.rand(3, 4))
        assert "\n" not in str(caught.value)
    # The graph that the exporter failed on is not printed either.
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('false INTERNAL ASSERT FAILED at "../torch/jit/a.cpp":621, please report a bug to PyTorch. ', "a.cpp: false"),
        ('x INTERNAL ASSERT FAILED at "/b/c.cpp":1, please report a bug to PyTorch. No type', "c.cpp: No type"),
        ("x" * 1000, f"{'x' * 299}…"),
    ],
)
def test_a_failed_check_of_torchs_is_its_reason(text: str, line: str) -> None:
    assert one_line(RuntimeError(text)) == f"RuntimeError: {line}"


def test_an_error_in_the_users_batch_is_not_taken_for_an_unsupported_model(pair: Pair, lines: list[str]) -> None:
    model, plain, _ = pair(MLM.build(), ort_fallback=True)
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
def test_a_backward_of_its_own_is_never_lost(pair: Pair, fallback: bool) -> None:
    from optimum_memopt.engines.ort.compat.extensions import BUILD_COMMAND, find

    model, plain, _ = pair(Adversarial(), ort_fallback=fallback)
    values = torch.rand(3, 4)
    if find() is None:
        with pytest.raises(UnsupportedModelError, match=f"Reversed.*{BUILD_COMMAND}"):
            model(values)
        return
    for trained in (model, plain):
        trained(values).backward()
    torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)


@pytest.mark.parametrize("dtype", nightly([torch.bfloat16, torch.float16, torch.float64], but=[torch.bfloat16]))
def test_only_float32_trains_on_the_cpu(attach: Attach, dtype: torch.dtype) -> None:
    model = ROBERTA.build()
    with pytest.raises(UnsupportedModelError, match=r"float32 only; call model.float\(\)"):
        attach(copy.deepcopy(model).to(dtype))
    attach(model)
    accumulate(model, [ROBERTA.batch()])
    model.to(dtype)
    with pytest.raises(UnsupportedModelError, match=r"float32 only; call model.float\(\)"):
        model(**ROBERTA.batch())
    plain = copy.deepcopy(model).float()
    assert_same_step(model.float(), plain, ROBERTA.batch())


@pytest.mark.parametrize("when", nightly(["from the first step on", "later"], but=["later"]))
def test_autocast_on_the_cpu_is_refused(pair: Pair, when: str) -> None:
    model, plain, _ = pair(ROBERTA.build())
    if when == "later":
        accumulate(model, [ROBERTA.batch()])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedModelError, match=r"under torch\.autocast on the CPU"):
            model(**ROBERTA.batch())
        with torch.no_grad():
            assert model(**ROBERTA.batch()).logits.dtype == plain(**ROBERTA.batch()).logits.dtype
    assert_same_step(model, plain, ROBERTA.batch())


def test_second_backwards_and_second_derivatives():
    case = ZOO["roberta-classification"]
    model, batch = case.build(), case.batch()
    optimize(model, memory_opt_engine="ort", ort_fallback=False)
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        with pytest.raises(MemOptError, match=r"^a second backward of one forward .*--memory_opt_engine compile$"):
            loss.backward()
    weight = model.classifier.out_proj.weight
    with pytest.raises(MemOptError, match="^backward with create_graph=True through ONNX Runtime"):
        torch.autograd.grad(model(**batch).loss, weight, create_graph=True)
    # The refused backward leaves nothing behind.
    assert torch.autograd.grad(model(**batch).loss, weight)[0].abs().sum() > 0
