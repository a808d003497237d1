"""Changes after the export are noticed; changes that a graph cannot follow are refused."""

import copy
import random

import numpy
import pytest
import torch

from optimum_memopt.engines.ort.session.module_state import ModuleState, ReexportLimit, describe_changes
from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import assert_same_step
from tests.model_zoo import _BERT, _DEBERTA, ZOO, Case, masked_lm
from tests.ort.helpers import needs_ort

pytestmark = needs_ort


@pytest.fixture
def rebuilds(lines):
    def since_last():
        exports = [line for line in lines if "re-exporting the model" in line]
        lines.clear()
        return exports

    return since_last


def test_changed_settings_of_modules_train_as_in_pytorch(attach, pair, rebuilds):
    case = Case("RobertaForMaskedLM", "RobertaConfig", {**_BERT, "num_hidden_layers": 1}, masked_lm)
    model, plain, _ = pair(case.build())

    def in_both(change):
        for trained in (model, plain):
            change(trained.roberta.encoder.layer[0])
        assert_same_step(model, plain, case.batch())
        return rebuilds()

    assert in_both(lambda layer: None) == []
    for change, line in (
        (lambda layer: setattr(layer.output.LayerNorm, "eps", 0.1), "output.LayerNorm.eps was 1e-12, is 0.1"),
        (lambda layer: setattr(layer.attention.self, "scaling", 2.0), "attention.self.scaling was 0.35"),
        (
            lambda layer: setattr(layer.intermediate, "intermediate_act_fn", torch.nn.Tanh()),
            "was GELUActivation, is Tanh",
        ),
    ):
        (rebuild,) = in_both(change)
        assert line in rebuild
        assert in_both(lambda layer: setattr(layer, "note", object())) == []

    with torch.no_grad():
        before = float(model(**case.batch()).loss)
    model.roberta.encoder.layer[0].output.dropout.p = 0.9
    assert abs(float(model(**case.batch()).loss.detach()) - before) > 1e-3
    (rebuild,) = rebuilds()
    assert "output.dropout.p was 0.0, is 0.9" in rebuild


def test_a_checkpoint_takes_no_new_graph(attach, rebuilds, tmp_path):
    """A checkpoint, which adds the model's class and dtype to its config, causes no re-export."""
    case = ZOO["roberta-mlm"]
    model = case.build()
    attach(model)
    model(**case.batch()).loss.backward()
    assert model.config.architectures is None
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["RobertaForMaskedLM"]
    model(**case.batch(seed=1)).loss.backward()
    assert rebuilds() == []


class Counting(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind, self.calls = torch.nn.Linear(4, 4), kind, 0
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, values):
        values = self.linear(values)
        if self.kind == "counter":
            self.calls += 1
            return values.square().mean() * self.calls
        if self.kind == "replaced buffer":
            self.steps = self.steps + 1
            return values.square().mean() * self.steps.sum()
        if self.kind == "buffer in place":
            self.mean.mul_(0.9).add_(values.detach().mean(0))
            return (values - self.mean).square().mean()
        chance = random.random() if self.kind == "random" else numpy.random.rand()
        return values.square().mean() * (1 + (chance < 0.5))


@pytest.mark.parametrize(
    "kind, message",
    [
        ("replaced buffer", "its forward writes to steps, which would be updated neither here nor in"),
        ("buffer in place", "its forward writes to mean"),
        ("random", "draws from Python's random"),
        ("numpy", "draws from numpy.random"),
    ],
)
def test_side_effects_of_a_forward_are_refused_at_the_first_step(attach, kind, message):
    model = Counting(kind)
    attach(model)
    with pytest.raises(UnsupportedModelError, match=message) as error:
        model(torch.rand(3, 4))
    assert "\n" not in str(error.value)

    model, plain = Counting(kind), Counting(kind)
    engine = attach(model, ort_fallback=True)
    for step in range(3):
        values = torch.rand(3, 4)
        for trained in (model, plain):
            random.seed(step)
            numpy.random.seed(step)
            trained(values).backward()
    assert message in engine.plans().header[0]
    torch.testing.assert_close(model.linear.weight.grad, plain.linear.weight.grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_a_counter_of_the_forward_is_right_until_it_is_refused(attach, rebuilds):
    model, plain = Counting("counter"), Counting("counter")
    attach(model)
    values = torch.rand(3, 4)
    for _ in range(3):
        torch.testing.assert_close(model(values), plain(values))
    assert rebuilds()[0].endswith("calls was 0, is 1")
    with pytest.raises(UnsupportedModelError, match=r"calls keeps changing \(2 -> 3\).*keep it fixed"):
        model(values)


def test_a_schedule_that_was_refused_is_said_once(attach, rebuilds, lines):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    attach(model, ort_fallback=True)
    refusals = []
    for step in range(8):
        model[1].p = 0.1 + step / 20
        model(torch.rand(3, 4)).sum().backward()
        refusals += [line for line in lines if "1.p keeps changing" in line]
        rebuilds()
    assert len(refusals) == 1


def test_layerdrop_is_refused_with_the_line_that_sets_it(attach):
    model = ZOO["bart"].build(encoder_layerdrop=0.5)
    attach(model)
    batch = ZOO["bart"].batch()
    with pytest.raises(UnsupportedModelError, match=r"set model\.model\.encoder\.layerdrop \(now 0\.5\) to 0"):
        model(**batch)
    model.model.encoder.layerdrop = 0
    plain = copy.deepcopy(model)
    assert_same_step(model, plain, batch)


def test_a_second_shape_that_the_graph_does_not_take_is_a_line(pair):
    case = Case("DebertaForMaskedLM", "DebertaConfig", {**_DEBERTA, "max_relative_positions": 16}, masked_lm)
    model, plain, _ = pair(case.build())
    assert_same_step(model, plain, case.batch())
    with pytest.raises(
        UnsupportedModelError, match="pad all batches to one shape.*--memory_opt_engine compile"
    ) as error:
        model(**case.batch(3, 7))
    assert "\n" not in str(error.value)
    wrong = {**case.batch(), "labels": torch.zeros(3, 2, dtype=torch.long)}
    with pytest.raises((RuntimeError, ValueError)) as error:
        model(**wrong)
    assert not isinstance(error.value, UnsupportedModelError)


def test_a_state_names_what_has_changed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1), torch.nn.BatchNorm1d(2))
    model.scales = [1.0, {"a": (2, 3)}]
    state = ModuleState(model)
    assert state.changes(ModuleState(model)) == {}
    model[2].running_mean.add_(1)
    assert state.changes(ModuleState(model)) == {}
    for change, words in (
        (lambda: setattr(model[1], "p", 0.2), "1.p was 0.1, is 0.2"),
        (lambda: model.scales[1].update(a=4), "scales was list(1.0, dict("),
        (lambda: model[0].weight.requires_grad_(False), "tensor 0.weight was"),
        (lambda: model[1].eval(), "1.training was True, is False"),
        (lambda: model.append(torch.nn.ReLU()), "class of 3 was not there, is ReLU"),
        (lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.rand(2, 2))), "tensor 0.weight was"),
    ):
        change()
        now = ModuleState(model)
        assert words in " ".join(describe_changes({name: change}) for name, change in state.changes(now).items())
        state = now
    del model[1].inplace
    assert state.changes(ModuleState(model))


def test_the_reexport_limit_counts_changes_in_a_window_of_forwards():
    limit = ReexportLimit()
    exceeded = []
    for step in range(200):
        exceeded.append(limit.record(["rare.p", "x.training", "module y"] if step % 20 == 0 else []))
    assert set(exceeded) == {""}
    assert [limit.record(["p"]) for _ in range(3)] == ["", "", "p"]
