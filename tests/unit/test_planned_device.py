"""A CUDA device that is not there: `tests/cuda/test_plan_device.py` compares what is predicted for it."""

import itertools

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.compile.capture.standins import kernel, traced_for
from optimum_memopt.engines.compile.costs.devices import DEVICES

H100, A100, T4 = ((9, 0), (8, 0), (7, 5))
NORM, SUM, PRODUCT = (lambda x: functional.layer_norm(x, (4,)), lambda x: x.sum(-1), lambda x: x @ x.T)


@pytest.mark.parametrize(
    "capability, is_half, has_mask, has_dropout, shares_keys, expected",
    [
        (H100, False, True, True, False, "efficient"),
        (H100, False, False, False, True, "math"),
        (H100, True, False, False, False, "cudnn"),
        (H100, True, False, True, False, "flash"),
        (H100, True, True, True, False, "efficient"),
        (H100, True, True, False, True, "math"),
        (A100, True, False, False, True, "flash"),
        (T4, True, False, False, False, "efficient"),
    ],
)
def test_the_kernel_is_the_one_that_torch_takes(capability, is_half, has_mask, has_dropout, shares_keys, expected):
    assert kernel(capability, is_half, has_mask, has_dropout, shares_keys) == expected


def dtypes() -> list[torch.dtype]:
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        return [operation(half).dtype for operation in (NORM, SUM, PRODUCT)]


def test_autocast_casts_as_on_cuda_and_then_as_before():
    before = dtypes()
    attention = functional.scaled_dot_product_attention
    with traced_for(DEVICES["H100"], torch.bfloat16):
        assert dtypes() == [torch.float32, torch.float32, torch.bfloat16]
        assert functional.scaled_dot_product_attention is not attention
    assert dtypes() == before != [torch.float32, torch.float32, torch.bfloat16]
    assert functional.scaled_dot_product_attention is attention


def test_an_error_leaves_nothing_behind():
    before, attention = dtypes(), functional.scaled_dot_product_attention
    with pytest.raises(RuntimeError, match="stop"), traced_for(DEVICES["H100"], torch.bfloat16):
        raise RuntimeError("stop")
    assert dtypes() == before and functional.scaled_dot_product_attention is attention


@pytest.mark.parametrize("device", [None, DEVICES["MI300X"]], ids=["here", "no CUDA"])
def test_other_devices_keep_the_operators(device):
    attention = functional.scaled_dot_product_attention
    with traced_for(device, None):
        assert functional.scaled_dot_product_attention is attention


@pytest.mark.parametrize(("mask", "dropout"), list(itertools.product([None, "numbers", "truth"], [0.0, 0.1])))
def test_attention_has_the_shape_of_torchs(mask, dropout):
    query = torch.empty(2, 4, 10, 8, device="meta")
    masks = {
        "numbers": torch.zeros(2, 1, 10, 10, device="meta"),
        "truth": torch.ones(2, 1, 10, 10, device="meta", dtype=torch.bool),
    }
    with traced_for(DEVICES["H100"], None):
        found = functional.scaled_dot_product_attention(query, query, query, masks.get(mask), dropout)
    assert found.shape == query.shape
