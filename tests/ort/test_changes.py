import copy
from collections.abc import Callable

import pytest
import torch

from optimum_memopt.engines.api.run import Selection
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import accumulate, assert_same_step, wrong_gradients
from tests.ort import helpers
from tests.ort.helpers import DROPOUT, MLM, ROBERTA, Attach, Pair, inputs
from tests.rotation import nightly

pytestmark = helpers.needs_ort


LEVEL_1 = Selection(level=1)


@pytest.mark.parametrize("selection", nightly([Selection(), LEVEL_1], but=[LEVEL_1]), ids=["no plan", "level 1"])
def test_other_inputs_than_the_first_are_not_run_with_the_first_graph(pair: Pair, selection: Selection) -> None:
    model, plain, _ = pair(MLM.build(), selection)
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
        *(inputs(MLM, num_items_in_batch=count) for count in (torch.tensor(17), 17, 5)),
        inputs(MLM),
    ):
        helpers.assert_same_outputs(model, plain, batch)


def test_positional_arguments_and_tuples(pair: Pair) -> None:
    model, plain, _ = pair(MLM.build())
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


def test_flags_and_numbers_among_the_inputs_are_not_those_of_the_first_call(pair: Pair) -> None:
    torch.manual_seed(0)
    model, plain, _ = pair(Steered())
    values = torch.rand(2, 4)
    for steering in ({"square": True}, {"square": False}, {}, {"factor": 2.0}, {"factor": 3.0}, {"square": True}):
        for trained in (model, plain):
            trained.zero_grad()
            trained(values, **steering).backward()
        torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)


def test_gradients_reach_the_inputs(pair: Pair) -> None:
    model, plain, _ = pair(ROBERTA.build(), helpers.config("Gelu+:1:-1"))
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
    "change", nightly([helpers.freeze, resize, new_layer, new_data, load, assign, through_float64], but=FAST)
)
def test_changed_parameters_train(pair: Pair, change: Callable[[torch.nn.Module], None]) -> None:
    model, plain, engine = pair(MLM.build(), Selection(level=1))
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
def test_dropout_in_evaluation_mode_is_not_trained_as_if_it_were_not(pair: Pair, when: str) -> None:
    model, plain, engine = pair(ROBERTA.build(**DROPOUT), ort_fallback=True)
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


def test_running_statistics_are_not_lost(attach: Attach, pair: Pair) -> None:
    torch.manual_seed(0)
    model, plain, engine = pair(Normalized(), ort_fallback=True)
    for _ in range(3):
        values = torch.randn(8, 6)
        for trained in (model, plain):
            trained(values).backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)
    assert "running statistics of norm" in engine.plans().header[0]
    with pytest.raises(UnsupportedModelError, match="running statistics of norm"):
        attach(Normalized())._model(torch.randn(8, 6))
