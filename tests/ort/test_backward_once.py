"""A backward that ONNX Runtime cannot run is refused in a line."""

import pytest
import torch

from optimum_memopt import MemOptError, optimize
from tests.model_zoo import ZOO


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
    # The refused one has left nothing behind.
    assert torch.autograd.grad(model(**batch).loss, weight)[0].abs().sum() > 0
