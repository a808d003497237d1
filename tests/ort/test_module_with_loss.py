"""The loss inside ONNX Runtime: training is equal to that with the loss outside, and uses only labelled rows."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

from optimum_memopt import MemOptError, MemOptTrainer, attach
from optimum_memopt.engines.api.run import Selection
from optimum_memopt.engines.ort.engine import OrtEngine
from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing
from optimum_memopt.errors import UnsupportedModelError
from optimum_memopt.plans.grammar import parse
from tests.gradients import TOLERANCE, accumulate, assert_same_step
from tests.model_zoo import IGNORE, UNTRAINABLE, ZOO
from tests.ort.helpers import Attach, needs_ort
from tests.rotation import nightly
from tests.trackers import numbers, tracked
from tests.trainer_runs import distance, log_lines, make, rows, weights

pytestmark = needs_ort

MLM = "roberta-mlm"
SMOOTHING = LabelSmoothing(LabelSmoother(epsilon=0.1), shift_labels=False)

Attached = Callable[..., OrtEngine]


@pytest.fixture
def attached(attach: Attach) -> Attached:
    """Returns a function that attaches an engine with the loss inside, without fallback, for the test's duration."""
    return functools.partial(attach, ort_module_with_loss=True)


def sparse(batch: dict[str, torch.Tensor], part: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the batch with labels for this share of its tokens, never for the first token."""
    kept = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(seed)) < part
    kept.view(-1)[0] = False
    return {**batch, "labels": batch["labels"].where(kept, IGNORE)}


def projected_rows(engine: OrtEngine) -> str:
    """Returns the operator that produces the input of the vocabulary projection."""
    graph = engine.graph
    producers = {output: node for node in graph.node for output in node.output}
    loss = next(node for node in graph.node if node.op_type in ("SoftmaxCrossEntropyLossInternal", "LogSoftmax"))
    node = producers[loss.input[0]]
    while "MatMul" not in node.op_type:
        node = next(producers[name] for name in node.input if name in producers)
    return producers[node.input[0]].op_type


@pytest.mark.parametrize("name", nightly([MLM, "gpt2", "t5", "deberta-v2-mlm"], but=[MLM, "t5"]))
def test_the_same_step_from_the_labelled_rows(attached: Attached, name: str) -> None:
    case = ZOO[name]
    model = case.build()
    plain = copy.deepcopy(model)
    engine = attached(model)
    # The sum over an accumulated batch is divided by its number of labels, which the Trainer passes to the model.
    items = {"num_items_in_batch": torch.tensor(11)} if name == "gpt2" else {}
    assert_same_step(model, plain, {**sparse(case.batch(4, 12), 0.15), **items})
    table = engine.plans()
    assert_same_step(model, plain, {**sparse(case.batch(3, 7, seed=1), 0.5), **items})
    assert_same_step(model, plain, {**sparse(case.batch(4, 12, seed=2), 0.3), **items}, {**case.batch(2, 9), **items})
    assert engine.plans() is table, "other shapes and numbers of labels need no new graph"
    assert projected_rows(engine) == "ShrunkenGather"


@pytest.mark.parametrize("smoothing", [None, SMOOTHING], ids=["plain", "smoothed"])
def test_all_rows_are_projected_without_label_sparsity(attached: Attached, smoothing: LabelSmoothing | None) -> None:
    model = ZOO[MLM].build()
    losses = []
    for on in (True, False):
        engine = attached(model, ort_label_sparse_optimizer=on)
        engine.smooth_labels(smoothing)
        losses.append(model(**sparse(ZOO[MLM].batch(), 0.15)).loss)
        assert (projected_rows(engine) == "ShrunkenGather") == on
        engine.detach()
    torch.testing.assert_close(*losses, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("plan", nightly(["Gelu+:1:-1", 1], but=[1]))
def test_the_same_step_under_plans(attached: Attached, plan: str | int) -> None:
    model = ZOO[MLM].build()
    plain = copy.deepcopy(model)
    engine = attached(model, Selection(level=plan) if isinstance(plan, int) else Selection(config=parse(plan)))
    assert_same_step(model, plain, sparse(ZOO[MLM].batch(), 0.15))
    on = engine.plans().enabled
    assert {row.config for row in on} == {plan} if isinstance(plan, str) else len(on) > 2
    assert all(row.applied_count == row.frequency and row.saving_bytes for row in on)
    # The head's own Gelu runs on all rows; only the logits are reduced, which no plan stashes.
    assert next(row for row in engine.plans().plans if row.config == "Gelu+:1:-1").frequency == 3
    assert all(row.saving_bytes is not None for row in engine.plans().plans), "a size that the table does not know"


def test_training_returns_the_loss_alone_and_the_model_stays_as_it_was(attached: Attached) -> None:
    case = ZOO[MLM]
    model = case.build()
    plain = copy.deepcopy(model)
    cross_entropy = torch.nn.functional.cross_entropy
    engine = attached(model)
    outputs = model(**sparse(case.batch(), 0.15))
    assert type(outputs) is type(plain(**case.batch())) and list(outputs) == ["loss"]
    assert type(model) is type(plain) and list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert torch.nn.functional.cross_entropy is cross_entropy
    for trained in (model, plain):
        trained.eval()
    with torch.no_grad():
        ours, expected = model(**case.batch(seed=1)), plain(**case.batch(seed=1))
    torch.testing.assert_close(ours.logits, expected.logits, rtol=0, atol=0)
    model.train()
    (loss,) = model(**sparse(case.batch(), 0.15), return_dict=False)
    torch.testing.assert_close(loss, outputs.loss, rtol=TOLERANCE, atol=0)
    engine.detach()
    assert set(vars(model)) == set(vars(plain))


def test_a_batch_without_a_loss_is_returned_whole_and_that_is_said(attached: Attached) -> None:
    case = ZOO[MLM]
    model = case.build()
    attached(model)
    with log_lines() as lines:
        outputs = model(**case.without_labels(case.batch()))
    assert outputs.logits.requires_grad
    assert any("the model returned no loss for this batch" in line for line in lines)


def test_cross_entropy_comes_back_when_the_forward_fails(attached: Attached) -> None:
    cross_entropy = torch.nn.functional.cross_entropy
    model = ZOO[MLM].build()
    attached(model)
    with pytest.raises(UnsupportedModelError, match=r"batch_size \(48\) to match target batch_size \(36\)"):
        model(**{**ZOO[MLM].batch(4, 12), "labels": torch.zeros(3, 12, dtype=torch.long)})
    assert torch.nn.functional.cross_entropy is cross_entropy


@pytest.mark.parametrize("name", nightly([MLM, "t5"], but=[MLM]))
def test_labels_that_stop_fitting_are_refused(attached: Attached, name: str) -> None:
    """Labels that stop fitting are refused: the selected rows would exist, but belong to other tokens."""
    case = ZOO[name]
    model = case.build()
    attached(model)
    batch, labelled = case.batch(4, 12), "decoder_input_ids" if name == "t5" else "input_ids"
    batch |= {labelled: batch["labels"].clamp(min=0)}
    model(**batch).loss.backward()
    with pytest.raises(MemOptError, match=rf"labels of shape \(3, \d+\) for {labelled} of shape \(4, \d+\)"):
        model(**{**batch, "labels": batch["labels"][:3]})
    accumulate(model, [case.batch(3, 7)])


def test_cached_exports_of_other_losses_are_not_taken(attached: Attached, tmp_path: Path) -> None:
    batch = sparse(ZOO[MLM].batch(), 0.3)
    model = ZOO[MLM].build()
    losses = []
    for smoothing in (None, SMOOTHING, None):
        engine = attached(model, ort_cache_dir=str(tmp_path))
        engine.smooth_labels(smoothing)
        losses.append(model(**batch).loss.item())
        engine.detach()
    assert len(list(tmp_path.iterdir())) == 2
    assert losses[0] == losses[2] != losses[1]


# In a Trainer.

SETUPS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "smoothing": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
}


def sparse_rows(name: str, **which: int) -> list[dict[str, torch.Tensor]]:
    made = rows(name, **which)
    if name == "roberta-classification":
        return made
    return [sparse(row, 0.0 if index % 3 == 2 else 0.4, seed=index) for index, row in enumerate(made)]


@pytest.mark.parametrize(
    ("name", "setup"),
    nightly(
        [(MLM, "accumulation"), ("gpt2", "accumulation")]
        + [(name, "smoothing") for name in ("roberta-classification", MLM, "gpt2")],
        but=[("gpt2", "accumulation"), (MLM, "smoothing")],
    ),
)
def test_the_trainer_ends_with_the_same_weights(tmp_path: Path, name: str, setup: str) -> None:
    data = {"train_dataset": sparse_rows(name), "eval_dataset": sparse_rows(name, count=6, seed=1)}
    plain = make(tmp_path, name, plain=True, **data, **SETUPS[setup])
    ours = make(tmp_path, name, ort_module_with_loss=True, **data, **SETUPS[setup])
    start = weights(ours.model)
    for trainer in (plain, ours):
        trainer.train()
    assert (projected_rows(ours.memopt.engine) == "ShrunkenGather") == (name != "roberta-classification")
    assert distance(weights(plain.model), start) > 100 * TOLERANCE
    assert distance(weights(ours.model), weights(plain.model)) < TOLERANCE
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=TOLERANCE)
    assert ours.label_smoother == plain.label_smoother


def test_label_smoothing_stays_when_pytorch_trains_instead(tmp_path: Path) -> None:
    case, _, _, _ = UNTRAINABLE["mixtral"]
    data = {"train_dataset": rows("llama"), "label_smoothing_factor": 0.3, "max_steps": 2}
    plain = make(tmp_path, "llama", plain=True, model=case.build(), **data)
    ours = make(tmp_path, "llama", model=case.build(), ort_module_with_loss=True, ort_fallback=True, **data)
    for trainer in (plain, ours):
        trainer.train()
    assert ours.memopt.table.header[0].startswith("NOT on ONNX Runtime")
    assert distance(weights(ours.model), weights(plain.model)) < TOLERANCE


def test_the_density_is_that_of_the_labels(tmp_path: Path) -> None:
    data = {"train_dataset": sparse_rows(MLM), "max_steps": 1}
    found = []
    for flag in (True, False):
        trainer = make(
            tmp_path, MLM, ort_module_with_loss=flag, log_input_density=True, label_smoothing_factor=0.1, **data
        )
        tracked(trainer).train()
        logged = {key: value for entry in numbers(trainer) for key, value in entry.items()}
        found.append({key: value for key, value in logged.items() if "density" in key})
    assert found[0] == found[1]
    assert any("labels" in key for key in found[0])


class OwnLoss(MemOptTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("case", ["function", "method", "attached"])
def test_a_loss_of_the_users_own_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(MemOptError, match="--ort_module_with_loss with ") as caught:
        if case == "function":
            make(tmp_path, MLM, ort_module_with_loss=True, compute_loss_func=lambda outputs, labels, **_: outputs.loss)
        elif case == "method":
            make(tmp_path, MLM, trainer=OwnLoss, ort_module_with_loss=True)
        else:
            plain = make(tmp_path, MLM, plain=True)
            plain.compute_loss = lambda *args, **kwargs: Trainer.compute_loss(plain, *args, **kwargs)
            attach(plain, ort_module_with_loss=True)
    message = str(caught.value)
    assert ("compute_loss_func" if case == "function" else "own compute_loss") in message and "\n" not in message
