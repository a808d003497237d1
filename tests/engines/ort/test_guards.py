"""Each way in which ONNX Runtime trains wrongly without a word, and what stands in its way here."""

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from optimum_memopt.engines.base import Selection, engine_of
from optimum_memopt.engines.ort import missing
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.errors import MemOptError, UnsupportedModelError
from optimum_memopt.plans.grammar import ConfigError, parse
from tests.gradients import TOLERANCE, accumulate, assert_same_step, wrong_gradients
from tests.model_zoo import IGNORE, ZOO

pytestmark = pytest.mark.skipif(bool(missing()), reason="no onnxruntime-training")

ROBERTA = ZOO["roberta-classification"]
MLM = ZOO["roberta-mlm"]
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}

Attach = Callable[..., OrtEngine]


@pytest.fixture
def attach() -> Iterator[Attach]:
    """Attaches an engine, fallback off, and detaches it after the test."""
    engines = []

    def attach(model: torch.nn.Module, selection: Selection | None = None, **options: Any) -> OrtEngine:
        engine = OrtEngine(selection, OrtOptions(**{"ort_fallback": False, **options}))
        engine.attach(model)
        engines.append(engine)
        return engine

    yield attach
    for engine in engines:
        engine.detach()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The package's log, which otherwise does not propagate to where pytest listens."""
    from optimum_memopt.logs import get_logger

    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level("INFO")
    return caplog


def config(text: str) -> Selection:
    return Selection(config=parse(text))


def times_said(log: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in log.records)


# Dropout under recompute: ONNX Runtime draws the masks again, in the order of the forwards.


def dropout_plans(attach: Attach) -> str:
    """Every plan of the model that recomputes a Dropout."""
    engine = attach(ROBERTA.build(**DROPOUT))
    engine._model(**ROBERTA.batch()).loss.backward()
    plans = [row.config for row in engine.plans().plans if "Dropout+" in row.config and row.config.endswith(":1:-1")]
    assert plans
    return ",".join(plans)


def step_with_dropout(
    attach: Attach, selection: Selection, unpaired: bool, move: torch.Tensor | None = None
) -> tuple[float, torch.Tensor]:
    """Loss and gradient (as one vector) of the third step from one seed, after which the weights were moved.

    unpaired: after each of the first two steps a forward without a backward, the guard put out of action.
    """
    model = ROBERTA.build(seed=3, **DROPOUT)
    torch.manual_seed(11)
    engine = attach(model, selection)
    for seed in range(2):
        accumulate(model, [ROBERTA.batch(seed=seed)])
        if unpaired:
            model(**ROBERTA.batch(seed=7))
            engine._backward_is_due = False
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
    """Between the loss's slope along the gradient as two losses with the same dropout masks tell it, and the
    gradient's own length: plain PyTorch draws other masks, so that only ORT itself can be compared with."""
    _, gradient = step_with_dropout(attach, selection, unpaired)
    step = gradient / gradient.norm() * 2e-3
    ahead, _ = step_with_dropout(attach, selection, unpaired, step)
    behind, _ = step_with_dropout(attach, selection, unpaired, -step)
    return abs((ahead - behind) / (2 * float(step.norm())) / float(gradient.norm()) - 1)


def test_recomputed_dropout_has_the_masks_of_the_forward(attach: Attach) -> None:
    assert slope_error(attach, Selection(), unpaired=False) < 0.01
    assert slope_error(attach, Selection(), unpaired=True) < 0.01
    assert slope_error(attach, config(dropout_plans(attach)), unpaired=False) < 0.01
    assert slope_error(attach, Selection(level=1), unpaired=False) < 0.01


def test_recomputed_dropout_is_wrong_after_unpaired_forwards(attach: Attach) -> None:
    """Why the guard is there."""
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


def test_unpaired_forwards_are_right_without_recomputed_dropout(attach: Attach) -> None:
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    engine = attach(model, config("Gelu+:1:-1"))
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


# Skip checks: ONNX Runtime by default runs its first graph for whatever comes later.


def inputs(case: Any, length: int = 12, **changes: Any) -> dict[str, Any]:
    """A batch with some of its entries replaced, or left out where the replacement is None."""
    batch = {**case.batch(4, length), **changes}
    return {name: value for name, value in batch.items() if value is not None}


def same_outputs(model: torch.nn.Module, plain: torch.nn.Module, batch: dict[str, Any]) -> None:
    """One backward through the logits, and through the loss where there is one."""
    found = []
    for trained in (model, plain):
        trained.zero_grad(set_to_none=True)
        outputs = trained(**batch)
        (outputs.logits.square().mean() + (outputs.loss if "labels" in batch else 0)).backward()
        found.append((outputs, {name: parameter.grad for name, parameter in trained.named_parameters()}))
    (ours, our_gradients), (expected, gradients) = found
    assert set(ours) == set(expected)
    torch.testing.assert_close(ours.logits, expected.logits, rtol=1e-5, atol=1e-6)
    if "labels" in batch:
        torch.testing.assert_close(ours.loss, expected.loss, rtol=TOLERANCE, atol=0)
    assert wrong_gradients(our_gradients, gradients) == {}


@pytest.mark.parametrize("selection", [Selection(), Selection(level=1)], ids=["no plan", "level 1"])
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
        same_outputs(model, plain, batch)


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


# Precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
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


@pytest.mark.parametrize("when", ["from the first step on", "later"])
def test_autocast_on_the_cpu_is_refused(attach: Attach, when: str) -> None:
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    attach(model)
    if when == "later":
        accumulate(model, [ROBERTA.batch()])
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedModelError, match=r"under torch\.autocast on the CPU"):
            model(**ROBERTA.batch())
        with torch.no_grad():
            assert model(**ROBERTA.batch()).logits.dtype == plain(**ROBERTA.batch()).logits.dtype
    assert_same_step(model, plain, ROBERTA.batch())


# The model stays an ordinary model.


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


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
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


# Parameters that change under way.


def freeze(model: torch.nn.Module) -> None:
    model.roberta.embeddings.requires_grad_(False)
    model.roberta.encoder.layer[0].requires_grad_(False)


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


@pytest.mark.parametrize("change", [freeze, resize, new_layer, new_data, load, assign, through_float64])
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


@pytest.mark.parametrize("when", ["from the first step on", "later"])
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


# Attaching and detaching.


def test_one_engine_for_a_model_and_one_model_for_an_engine(attach: Attach) -> None:
    model = ROBERTA.build()
    plain = copy.deepcopy(model)
    engine = attach(model)
    engine.attach(model)
    with pytest.raises(MemOptError, match="already has the ort engine attached"):
        attach(model)
    with pytest.raises(MemOptError, match="holds another model"):
        engine.attach(ROBERTA.build())
    assert_same_step(model, plain, ROBERTA.batch())
    engine.detach()
    engine.detach()
    assert engine_of(model) is None
    assert "forward" not in model.__dict__
    assert_same_step(model, plain, ROBERTA.batch())
    attach(model)
    assert_same_step(model, plain, ROBERTA.batch())


def test_two_models_train_side_by_side(attach: Attach) -> None:
    models = [ROBERTA.build(seed=0), ROBERTA.build(seed=1)]
    plain = copy.deepcopy(models)
    attach(models[0], config("Gelu+:1:-1"))
    attach(models[1], Selection(level=1))
    for seed in range(2):
        for model, reference in zip(models, plain, strict=True):
            assert_same_step(model, reference, ROBERTA.batch(seed=seed))


def test_a_dropped_model_and_engine_are_freed() -> None:
    import weakref

    model = ROBERTA.build()
    engine = OrtEngine(Selection(level=1), OrtOptions(ort_fallback=False))
    engine.attach(model)
    accumulate(model, [ROBERTA.batch()])
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None


def test_hooks_on_the_model_run_once_and_those_inside_are_warned_about(
    attach: Attach, log: pytest.LogCaptureFixture
) -> None:
    model = ROBERTA.build()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    model.register_forward_hook(lambda *_: calls.append("post"))
    model.roberta.encoder.register_forward_hook(lambda *_: None)
    attach(model)
    assert times_said(log, "hooks on 1 submodules (roberta.encoder)") == 1
    for _ in range(2):
        calls.clear()
        accumulate(model, [ROBERTA.batch()])
        assert calls == ["pre", "post"]


def test_a_forward_that_the_user_replaced_is_the_one_that_trains(attach: Attach) -> None:
    import types

    model = ROBERTA.build()

    def doubled(self: torch.nn.Module, **kwargs: Any) -> Any:
        outputs = type(self).forward(self, **kwargs)
        outputs.loss = outputs.loss * 2
        return outputs

    model.forward = types.MethodType(doubled, model)
    plain = copy.deepcopy(model)
    plain.forward = types.MethodType(doubled, plain)
    engine = attach(model)
    assert_same_step(model, plain, ROBERTA.batch())
    engine.detach()
    assert model.forward.__func__ is doubled


# Configs that ONNX Runtime would pass over.


def first_step(attach: Attach, selection: Selection, **options: Any) -> OrtEngine:
    model = MLM.build()
    engine = attach(model, selection, **options)
    accumulate(model, [MLM.batch()])
    return engine


def test_an_unknown_id_stops_with_near_matches_first(attach: Attach) -> None:
    with pytest.raises(ConfigError) as caught:
        first_step(attach, config("FusedMatMul+Add+Ad+:1:-1"))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith('no plan "FusedMatMul+Add+Ad+" in this model; did you mean FusedMatMul+Add+')
    assert "Gelu+" in message.partition("Available: ")[2]


def test_an_error_is_the_same_when_the_step_is_tried_again(attach: Attach) -> None:
    model = MLM.build()
    plain = copy.deepcopy(model)
    engine = attach(model, config("Nothing+:1:-1"))
    for _ in range(2):
        with pytest.raises(ConfigError, match='no plan "Nothing[+]"'):
            model(**MLM.batch())
    engine.apply(config("Gelu+:1:-1"))
    assert_same_step(model, plain, MLM.batch())


def test_without_strict_an_unknown_id_is_a_warning_and_the_rest_is_applied(
    attach: Attach, log: pytest.LogCaptureFixture
) -> None:
    lenient = Selection(config=parse("Gelu+:1:-1,Nothing+:1:-1"), strict=False)
    engine = first_step(attach, lenient)
    assert [plan.config for plan in engine.plans().enabled] == ["Gelu+:1:-1"]
    assert times_said(log, 'no plan "Nothing+"') == 1
    engine = first_step(attach, Selection(config=parse("Nothing+:1:-1"), strict=False))
    assert engine.plans().enabled == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Gelu+:2:-1", "Gelu[+]:2:-1: this plan has strategy 1 only"),
        ("Gelu+:1:3", "count 3 is not available on the ort engine.*allowed: -1 [(]all[)] and 0 [(]off[)]"),
        ("Gelu+:3:-1", "strategy 3 [(]offload[)] is not available on the ort engine"),
    ],
)
def test_what_ort_would_apply_differently_is_refused(attach: Attach, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        first_step(attach, config(text))


def test_a_cluster_id_without_its_plus_says_what_was_meant() -> None:
    with pytest.raises(ConfigError, match='did you mean "Gelu[+]"'):
        parse("Gelu:1:-1")


@pytest.mark.parametrize("text", ["Gelu+:1:0", "Gelu+:0:-1", "Gelu+:1:0,LayerNormalization+:0:0"])
def test_count_0_and_strategy_0_mean_off(attach: Attach, text: str) -> None:
    engine = first_step(attach, config(text))
    assert engine.plans().enabled == ()


def test_a_config_of_which_nothing_applies_is_an_error(attach: Attach) -> None:
    with pytest.raises(ConfigError, match="nothing of it applies to this model; Available: ") as caught:
        first_step(attach, config("BiasSoftmax+:1:-1,BiasDropout+:1:-1"))
    assert "\n" not in str(caught.value)


# Recipes and levels.


@pytest.mark.parametrize(
    ("asked", "applied", "changes"),
    [
        ("BiasGelu+:1:-1", "Gelu+:1:-1", {}),
        ("BitmaskDropout+:1:-1", "Dropout+:1:-1", DROPOUT),
    ],
)
def test_recipes_made_for_cuda_train_on_the_cpu(
    attach: Attach, log: pytest.LogCaptureFixture, asked: str, applied: str, changes: dict[str, Any]
) -> None:
    model = MLM.build(**changes)
    engine = attach(model, config(asked))
    accumulate(model, [MLM.batch()])
    (plan,) = engine.plans().enabled
    assert (plan.config, plan.applied_count) == (applied, plan.frequency)
    assert plan.note == f"asked for as {asked.split(':')[0]}"
    assert times_said(log, f"{asked} is {applied} on this provider") == 1


@pytest.mark.parametrize("name", ["roberta-mlm", "bert-mlm", "deberta-v2-mlm", "gpt2", "llama", "vit"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_level_leaves_normalizations_out_where_they_make_the_residual_stream(
    attach: Attach, log: pytest.LogCaptureFixture, name: str, level: int
) -> None:
    case = ZOO[name]
    model = case.build()
    engine = attach(model, Selection(level=level))
    accumulate(model, [case.batch()])
    normalizations = [plan for plan in engine.plans().plans if "LayerNormalization+" in plan.config]
    assert normalizations
    post_norm = name in ("roberta-mlm", "bert-mlm", "deberta-v2-mlm")
    assert {plan.is_on for plan in normalizations} == {not post_norm}
    assert all(plan.note.startswith("left out") == post_norm for plan in normalizations)
    assert times_said(log, f"level {level} leaves out") == int(post_norm)


# Fallback and torch.autograd.Function.


class Sorted(torch.nn.Module):
    """aten::histc has no ONNX symbolic."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values).square().mean() + torch.histc(values, bins=4).mean()


def test_fallback_is_said_once_and_stands_in_the_table(attach: Attach, log: pytest.LogCaptureFixture) -> None:
    model = Sorted()
    plain = copy.deepcopy(model)
    engine = attach(model, Selection(level=1), ort_fallback=True)
    values = torch.rand(3, 4)
    for _ in range(3):
        for trained in (model, plain):
            trained(values).backward()
    assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert times_said(log, "NOT on ONNX Runtime") == 1
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


def test_an_error_in_the_users_batch_is_not_taken_for_an_unsupported_model(
    attach: Attach, log: pytest.LogCaptureFixture
) -> None:
    model = MLM.build()
    plain = copy.deepcopy(model)
    attach(model, ort_fallback=True)
    accumulate(model, [MLM.batch()])
    wrong = MLM.batch()
    wrong["input_ids"] = wrong["input_ids"] + 1000
    with pytest.raises(IndexError, match="input_ids holds 10"):
        model(**wrong)
    assert times_said(log, "NOT on ONNX Runtime") == 0
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
    from optimum_memopt.engines.ort.extensions import BUILD_COMMAND, find

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


def test_a_cached_export_is_not_taken_for_another_graph(attach: Attach, tmp_path: Any) -> None:
    cases = [
        (MLM.build(), MLM.batch()),
        (MLM.build(), MLM.batch()),
        (MLM.build(), inputs(MLM, token_type_ids=torch.zeros(4, 12, dtype=torch.long))),
        (MLM.build(), inputs(MLM, labels=None)),
        (MLM.build(layer_norm_eps=0.1), MLM.batch()),
        (MLM.build(tie_word_embeddings=False), MLM.batch()),
        (MLM.build(**DROPOUT), MLM.batch()),
    ]
    frozen = MLM.build()
    freeze(frozen)
    cases.append((frozen, MLM.batch()))
    for model, batch in cases:
        plain = copy.deepcopy(model)
        engine = attach(model, ort_cache_dir=str(tmp_path))
        if model.config.hidden_dropout_prob:
            # With dropout the losses of two calls differ, those of a graph without it would not.
            assert len({float(model(**batch).loss.detach()) for _ in range(3)}) == 3
        else:
            same_outputs(model, plain, batch)
        engine.detach()
    assert any(tmp_path.rglob("*.onnx"))


def test_a_padding_row_gets_no_gradient(attach: Attach) -> None:
    """Without the extensions embeddings are a plain Gather, which does not know of it."""
    for name in ("roberta-mlm", "llama", "bart"):
        case = ZOO[name]
        model = case.build()
        plain = copy.deepcopy(model)
        attach(model, Selection(level=1))
        batch = case.batch()
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        assert_same_step(model, plain, {**batch, "labels": batch["labels"].clamp(min=1)})


def test_ignored_labels_do_not_count(attach: Attach) -> None:
    """ONNX Runtime skips padding and ignored labels in its own way; a batch of nothing but those is an edge of it."""
    model = MLM.build()
    plain = copy.deepcopy(model)
    attach(model, Selection(level=1))
    batch = MLM.batch()
    assert_same_step(model, plain, batch)
    sparse = {**batch, "labels": batch["labels"].masked_fill(torch.arange(12) != 3, IGNORE)}
    assert_same_step(model, plain, sparse)


# What an attached engine leaves alone, and what a fresh process finds.

TRAIN = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import torch, torch.utils.checkpoint
from tests.gradients import accumulate
from tests.model_zoo import ZOO
from optimum_memopt.engines.base import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.ort.options import OrtOptions

def train(name, selection):
    model, engine = ZOO[name].build(), OrtEngine(selection, OrtOptions(ort_fallback=False))
    engine.attach(model)
    accumulate(model, [ZOO[name].batch()])
    return engine
"""


def run(script: str, tmp_path: Path) -> str:
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_importing_the_package_imports_neither_onnxruntime_nor_deepspeed(tmp_path: Path) -> None:
    run(
        "import sys, optimum_memopt as m, optimum_memopt.engines.ort\n"
        "m.PlanConfig, m.PlanTable, m.MemOptError\n"
        "assert not {'onnxruntime', 'deepspeed'} & set(sys.modules)",
        tmp_path,
    )


def test_torch_and_its_exporter_are_left_as_they_were(tmp_path: Path) -> None:
    script = """
import io
import torch._dynamo  # replaces torch.manual_seed itself, whoever imports it

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 3)

    def forward(self, ids):
        return torch.nn.functional.gelu(self.linear(self.embedding(ids)))

small = Small()

def exported():
    file = io.BytesIO()
    torch.onnx.export(small, (torch.arange(6),), file, dynamo=False, opset_version=17)
    return file.getvalue()

originals = torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint
before = exported()
engine = train("vit", Selection(level=1))
for _ in range(2):
    assert (torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint) == originals
    assert exported() == before
    assert not [name for name in os.environ if name.startswith("ORTMODULE_")]
    assert not {"torch.onnx._internal.jit_utils", "torch.onnx._type_utils", "torch.onnx._globals"} & set(sys.modules)
    assert not hasattr(torch.onnx.symbolic_opset9, "_convolution")
    assert {name for name in sys.modules if sys.modules[name] is None and "deepspeed" in name} == set()
    engine.detach()
"""
    run(TRAIN + script, tmp_path)


def test_a_table_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = """
for name in ("roberta-mlm", "deberta-v2-classification", "gpt2", "t5"):
    for selection in (Selection(), Selection(level=1)):
        print(train(name, selection).plans().to_json())
"""
    first = run(TRAIN + script, tmp_path)
    assert first.count("saving_bytes") > 50
    assert run(TRAIN + script, tmp_path) == first
