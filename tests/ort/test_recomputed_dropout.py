"""Recomputed dropout: ONNX Runtime redraws the masks in the order of the forwards."""

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.errors import MemOptError
from tests.gradients import accumulate, wrong_gradients
from tests.ort.helpers import DROPOUT, ROBERTA, Attach, Pair, config, needs_ort

pytestmark = needs_ort


def dropout_plans(attach: Attach) -> str:
    engine = attach(ROBERTA.build(**DROPOUT))
    engine._model(**ROBERTA.batch()).loss.backward()
    plans = [row.config for row in engine.plans().plans if "Dropout+" in row.config and row.config.endswith(":1:-1")]
    assert plans
    return ",".join(plans)


def step_with_dropout(
    attach: Attach, selection: Selection, unpaired: bool, move: torch.Tensor | None = None
) -> tuple[float, torch.Tensor]:
    """Returns the loss and the flat gradient of the third step from one seed, after the weights were moved.

    Args:
        unpaired: whether a forward without a backward follows each of the first two steps, with the guard disabled.
    """
    model = ROBERTA.build(seed=3, **DROPOUT)
    torch.manual_seed(11)
    engine = attach(model, selection)
    for seed in range(2):
        accumulate(model, [ROBERTA.batch(seed=seed)])
        if unpaired:
            model(**ROBERTA.batch(seed=7))
            engine._session.backward_is_due = False
    if move is not None:
        weights = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(weights + move, model.parameters())
    losses, gradients = accumulate(model, [ROBERTA.batch(seed=2)])
    flat = [
        (torch.zeros_like(parameter) if gradients[name] is None else gradients[name]).flatten()
        for name, parameter in model.named_parameters()
    ]
    return float(losses), torch.cat(flat)


def slope_error(attach: Attach, selection: Selection, unpaired: bool) -> float:
    """Returns the relative error of the gradient's norm against the loss's slope from two losses with the same masks:
    plain PyTorch draws other masks, so ORT can only be compared with itself."""
    _, gradient = step_with_dropout(attach, selection, unpaired)
    step = gradient / gradient.norm() * 2e-3
    ahead, _ = step_with_dropout(attach, selection, unpaired, step)
    behind, _ = step_with_dropout(attach, selection, unpaired, -step)
    return abs((ahead - behind) / (2 * float(step.norm())) / float(gradient.norm()) - 1)


def test_recomputed_dropout_has_the_masks_of_the_forward(attach: Attach) -> None:
    assert slope_error(attach, config(dropout_plans(attach)), unpaired=False) < 0.01
    assert slope_error(attach, Selection(level=1), unpaired=False) < 0.01


@pytest.mark.nightly
@pytest.mark.parametrize("unpaired", [False, True])
def test_the_slope_is_right_without_a_plan(attach: Attach, unpaired: bool) -> None:
    assert slope_error(attach, Selection(), unpaired) < 0.01


@pytest.mark.nightly
def test_recomputed_dropout_is_wrong_after_unpaired_forwards(attach: Attach) -> None:
    assert slope_error(attach, config(dropout_plans(attach)), unpaired=True) > 0.05


def test_an_unpaired_forward_is_refused_with_recomputed_dropout(attach: Attach) -> None:
    model = ROBERTA.build(**DROPOUT)
    attach(model, config(dropout_plans(attach)))
    loss = model(**ROBERTA.batch()).loss
    with pytest.raises(MemOptError, match="a training forward follows one whose backward has not run"):
        model(**ROBERTA.batch())
    loss.backward()
    with torch.no_grad():
        model(**ROBERTA.batch())
    accumulate(model, [ROBERTA.batch(), ROBERTA.batch(3, 7, seed=1)])


def test_unpaired_forwards_are_right_without_recomputed_dropout(pair: Pair) -> None:
    model, plain, engine = pair(ROBERTA.build(), config("Gelu+:1:-1"))
    for trained in (model, plain):
        trained(**ROBERTA.batch(seed=5))
        first, second = trained(**ROBERTA.batch()).loss, trained(**ROBERTA.batch(3, 7, seed=1)).loss
        (first * 2 + second).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert wrong_gradients(ours, expected) == {}
    assert [plan.config for plan in engine.plans().enabled] == ["Gelu+:1:-1"]


def losses_with_seed(attach: Attach, seed: int) -> list[float]:
    model = ROBERTA.build(seed=3, **DROPOUT)
    torch.manual_seed(seed)
    attach(model, Selection(level=1))
    return [float(accumulate(model, [ROBERTA.batch()])[0]) for _ in range(3)]


def test_dropout_follows_torch_s_seed(attach: Attach) -> None:
    first = losses_with_seed(attach, 5)
    assert len(set(first)) == 3
    assert losses_with_seed(attach, 5) == first
    assert losses_with_seed(attach, 6) != first
