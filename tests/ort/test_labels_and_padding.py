"""Padding rows and ignored labels, which ONNX Runtime handles in its own way."""

import copy

import torch

from optimum_memopt.engines.api.run import Selection
from tests.gradients import assert_same_step
from tests.model_zoo import IGNORE, ZOO
from tests.ort.helpers import (
    MLM,
    Attach,
    needs_ort,
)

pytestmark = needs_ort


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
