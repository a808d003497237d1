"""Copies, pickles and checkpoints of an attached model are those of an ordinary model."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.shared.in_place import engine_of
from tests.gradients import accumulate, assert_same_step
from tests.ort.helpers import (
    ROBERTA,
    Attach,
    needs_ort,
)
from tests.rotation import nightly

pytestmark = needs_ort


def test_a_deep_copy_trains_plain_and_on_its_own(attach: Attach) -> None:
    model = ROBERTA.build()
    attach(model, Selection(level=1))
    accumulate(model, [ROBERTA.batch()])
    copied = copy.deepcopy(model)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (*copied.parameters(), *plain.parameters()):
            parameter.add_(0.01)
    assert engine_of(copied) is None
    before = [parameter.grad.clone() for parameter in model.parameters()]
    losses, gradients = accumulate(copied, [ROBERTA.batch()])
    assert all(torch.equal(old, parameter.grad) for old, parameter in zip(before, model.parameters(), strict=True))
    assert losses.item() != accumulate(model, [ROBERTA.batch()])[0].item()
    del plain.forward
    plain_losses, plain_gradients = accumulate(plain, [ROBERTA.batch()])
    assert torch.equal(losses, plain_losses)
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in gradients)


def through_pickle(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", nightly([copy.deepcopy, through_pickle, through_torch_save], but=["deepcopy"]))
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "detached"])
def test_copies_of_every_kind_are_plain_models(attach: Attach, copied: Callable[..., Any], attached: bool) -> None:
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    engine = attach(model, Selection(level=1))
    accumulate(model, [ROBERTA.batch()])
    if not attached:
        engine.detach()
        assert "forward" not in model.__dict__
    other = copied(model)
    assert engine_of(other) is None
    assert_same_step(other, plain, ROBERTA.batch())
    assert (engine_of(model) is engine) == attached
    assert_same_step(model, plain, ROBERTA.batch(3, 7))


def test_saving_while_attached(attach: Attach, tmp_path: Any) -> None:
    model = ROBERTA.build()
    keys = list(model.state_dict())
    attach(model, Selection(level=1))
    accumulate(model, [ROBERTA.batch()])
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == [name for name, _ in ROBERTA.build().named_modules()]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").train()
    assert engine_of(loaded) is None
    assert_same_step(model, loaded, ROBERTA.batch())


def test_training_stops_at_ort_s_own_copy(attach: Attach) -> None:
    """An optimizer over the model's parameters moves what the engine trains, step by step."""
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    attach(model, Selection(level=1))
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (model, plain)]
    for seed in range(3):
        assert_same_step(model, plain, ROBERTA.batch(seed=seed))
        for optimizer in optimizers:
            optimizer.step()
