"""Only float32 trains on the CPU."""

import copy

import pytest
import torch

from optimum_memopt.errors import UnsupportedModelError
from tests.gradients import accumulate, assert_same_step
from tests.ort.helpers import (
    ROBERTA,
    Attach,
    needs_ort,
)
from tests.rotation import nightly

pytestmark = needs_ort


@pytest.mark.parametrize("dtype", nightly([torch.bfloat16, torch.float16, torch.float64], but=[torch.bfloat16]))
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


@pytest.mark.parametrize("when", nightly(["from the first step on", "later"], but=["later"]))
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
