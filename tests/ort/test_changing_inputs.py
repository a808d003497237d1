"""Inputs that differ from the first batch: by default ONNX Runtime runs its first graph for all of them."""

import copy

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from tests.gradients import accumulate, wrong_gradients
from tests.ort.helpers import (
    DROPOUT,
    MLM,
    ROBERTA,
    Attach,
    assert_same_outputs,
    config,
    inputs,
    needs_ort,
)
from tests.rotation import nightly

pytestmark = needs_ort


LEVEL_1 = Selection(level=1)


@pytest.mark.parametrize("selection", nightly([Selection(), LEVEL_1], but=[LEVEL_1]), ids=["no plan", "level 1"])
def test_other_inputs_than_the_first_are_not_run_with_the_first_graph(attach: Attach, selection: Selection) -> None:
    model = MLM.build()
    plain = copy.deepcopy(model)
    attach(model, selection)
    types = torch.zeros(4, 12, dtype=torch.long)
    small = MLM.batch()["input_ids"].to(torch.int32)
    positions = torch.arange(20, 32).expand(4, 12)
    for batch in (
        inputs(MLM),
        inputs(MLM, token_type_ids=types),
        inputs(MLM, attention_mask=None),
        inputs(MLM, labels=None),
        inputs(MLM, labels=None, position_ids=positions),
        inputs(MLM, 8, labels=None),
        inputs(MLM),
        inputs(MLM, input_ids=small),
        inputs(MLM, num_items_in_batch=torch.tensor(17)),
        inputs(MLM, num_items_in_batch=17),
        inputs(MLM, num_items_in_batch=5),
        inputs(MLM),
    ):
        assert_same_outputs(model, plain, batch)


def test_positional_arguments_and_tuples(attach: Attach) -> None:
    model = MLM.build()
    plain = copy.deepcopy(model)
    attach(model)
    batch = MLM.batch()
    for return_dict in (True, False):
        for trained in (model, plain):
            outputs = trained(
                batch["input_ids"], batch["attention_mask"], labels=batch["labels"], return_dict=return_dict
            )
            assert isinstance(outputs, tuple) != return_dict
            (outputs[0] + outputs[1].square().mean()).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert wrong_gradients(ours, expected) == {}


class Steered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, values: torch.Tensor, *, square: bool = False, factor: float = 1.0) -> torch.Tensor:
        values = self.linear(values) * factor
        return (values.square() if square else values).sum()


def test_flags_and_numbers_among_the_inputs_are_not_those_of_the_first_call(attach: Attach) -> None:
    torch.manual_seed(0)
    model = Steered()
    plain = copy.deepcopy(model)
    attach(model)
    values = torch.rand(2, 4)
    for steering in ({"square": True}, {"square": False}, {}, {"factor": 2.0}, {"factor": 3.0}, {"square": True}):
        for trained in (model, plain):
            trained.zero_grad()
            trained(values, **steering).backward()
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


def test_gradients_reach_the_inputs(attach: Attach) -> None:
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    attach(model, config("Gelu+:1:-1"))
    batch = ROBERTA.batch()
    embedded = torch.randn(4, 12, 16)
    gradients = []
    for trained in (model, plain):
        leaf = embedded.clone().requires_grad_()
        trained(inputs_embeds=leaf, attention_mask=batch["attention_mask"], labels=batch["labels"]).loss.backward()
        gradients.append(leaf.grad)
    assert wrong_gradients({"inputs": gradients[0]}, {"inputs": gradients[1]}) == {}


def test_evaluation_and_training_take_turns(attach: Attach) -> None:
    model = MLM.build(**DROPOUT)
    plain = copy.deepcopy(model).eval()
    attach(model, Selection(level=1))
    for seed in range(2):
        accumulate(model, [MLM.batch(seed=seed)])
        model.eval()
        for batch in (MLM.batch(2, 9), MLM.without_labels(MLM.batch(5, 6))):
            assert torch.equal(model(**batch).logits, plain(**batch).logits)
            with torch.inference_mode():
                assert torch.equal(model(**batch).logits, plain(**batch).logits)
        model.train()
