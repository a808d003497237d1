"""Parameters, modes and statistics that change during training."""

import copy
from collections.abc import Callable

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import accumulate, assert_same_step
from tests.ort.helpers import (
    DROPOUT,
    MLM,
    ROBERTA,
    Attach,
    freeze,
    needs_ort,
)
from tests.rotation import nightly

pytestmark = needs_ort


def unfreeze(model: torch.nn.Module) -> None:
    model.requires_grad_(True)


def resize(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    model.resize_token_embeddings(131, mean_resizing=False)


def new_layer(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    model.roberta.encoder.layer[1].output.dense = torch.nn.Linear(24, 16)


def new_data(model: torch.nn.Module) -> None:
    torch.manual_seed(2)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1


def load(model: torch.nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def assign(model: torch.nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)


def through_float64(model: torch.nn.Module) -> None:
    model.double().float()


FAST = ["freeze", "resize", "load"]


@pytest.mark.parametrize(
    "change", nightly([freeze, resize, new_layer, new_data, load, assign, through_float64], but=FAST)
)
def test_changed_parameters_train(attach: Attach, change: Callable[[torch.nn.Module], None]) -> None:
    model = MLM.build()
    plain = copy.deepcopy(model)
    engine = attach(model, Selection(level=1))
    assert_same_step(model, plain, MLM.batch())
    change(model)
    change(plain)
    assert_same_step(model, plain, MLM.batch())
    assert_same_step(model, plain, MLM.batch(3, 7), MLM.batch(1, 5))
    unfreeze(model)
    unfreeze(plain)
    assert_same_step(model, plain, MLM.batch())
    assert engine.plans().enabled


def without_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) or hasattr(module, "dropout"):
            module.eval()


@pytest.mark.parametrize("when", nightly(["from the first step on", "later"], but=["later"]))
def test_dropout_in_evaluation_mode_is_not_trained_as_if_it_were_not(attach: Attach, when: str) -> None:
    model = ROBERTA.build(**DROPOUT)
    plain = copy.deepcopy(model)
    engine = attach(model, ort_fallback=True)
    if when == "later":
        accumulate(model, [ROBERTA.batch()])
        assert engine.plans().plans
    without_dropout(model)
    without_dropout(plain)
    assert_same_step(model, plain, ROBERTA.batch())
    assert "are in evaluation mode" in engine.plans().header[0]
    model.train()
    accumulate(model, [ROBERTA.batch()])
    assert engine.plans().plans


def test_submodules_stay_in_the_mode_that_the_user_chose(attach: Attach) -> None:
    model = ROBERTA.build()
    model.roberta.embeddings.eval()
    plain = copy.deepcopy(model)
    engine = attach(model)
    for seed in range(2):
        assert_same_step(model, plain, ROBERTA.batch(seed=seed))
        assert [module.training for module in model.modules()] == [module.training for module in plain.modules()]
    assert engine.plans().plans


class Normalized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.linear(values)).relu()).square().mean()


def test_running_statistics_are_not_lost(attach: Attach) -> None:
    torch.manual_seed(0)
    model = Normalized()
    plain = copy.deepcopy(model)
    engine = attach(model, ort_fallback=True)
    for _ in range(3):
        values = torch.randn(8, 6)
        for trained in (model, plain):
            trained(values).backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)
    assert "running statistics of norm" in engine.plans().header[0]
    with pytest.raises(UnsupportedModelError, match="running statistics of norm"):
        attach(Normalized())._model(torch.randn(8, 6))
