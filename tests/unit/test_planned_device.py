"""Planning for a CUDA device that is not present; `tests/cuda/test_plan_device.py` checks the predictions."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from optimum_memopt.engines.simulator.devices import DEVICES, device_at
from optimum_memopt.engines.simulator.standins import kernel, traced_for
from optimum_memopt.engines.torch_compat import kernels

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
        (H100, True, True, False, True, "cudnn"),
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


def strided(shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a mask laid out by heads, with gaps between its elements."""
    rows, heads, queries, keys = shape
    return torch.zeros(rows, queries, keys, heads, device="meta").permute(0, 3, 1, 2)


def recorded(called: list[str], name: str, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    called.append(name)
    return operator(*args, **kwargs)


@pytest.mark.parametrize(
    ("query", "key", "mask", "is_causal", "expected"),
    [
        ((2, 4, 16, 64), (2, 4, 16, 64), None, True, "cudnn"),
        ((2, 4, 16, 256), (2, 4, 16, 256), None, False, "flash"),
        ((2, 4, 16, 64), (2, 4, 32, 64), None, True, "cudnn"),
        ((2, 4, 16, 256), (2, 4, 32, 256), None, True, "efficient"),
        ((2, 4, 16, 64), (2, 4, 16, 64), torch.zeros(2, 1, 16, 16, device="meta"), False, "cudnn"),
        ((2, 4, 64, 64), (2, 4, 64, 64), torch.zeros(2, 1, 64, 64, device="meta"), False, "efficient"),
        ((2, 4, 16, 64), (2, 4, 16, 64), strided((2, 4, 16, 16)), False, "math"),
        ((2, 4, 16, 512), (2, 4, 16, 512), None, False, "efficient"),
        ((2, 4, 16, 20), (2, 4, 16, 20), None, False, "flash"),
        ((2, 4, 16, 20), (2, 4, 16, 20), torch.zeros(16, 16, device="meta"), False, "math"),
        ((4, 16, 64), (4, 16, 64), None, False, "math"),
        ((2, 4, 16, 64), (2, 2, 16, 64), torch.zeros(16, 16, device="meta"), False, "cudnn"),
    ],
)
def test_the_kernel_takes_sizes_and_strides(query, key, mask, is_causal, expected, monkeypatch):
    called = []
    for name, operator in kernels.ATTENTION.items():
        monkeypatch.setitem(kernels.ATTENTION, name, functools.partial(recorded, called, name, operator))
    queries, keys = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in (query, key))
    mask = mask if mask is None else mask.bfloat16()
    with traced_for(DEVICES["H100"], None):
        result = functional.scaled_dot_product_attention(
            queries, keys, keys, mask, is_causal=is_causal, enable_gqa=query[1] != key[1]
        )
    assert called == [expected]
    assert result.shape == queries.shape


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        # Not in the table: not the device whose name is a part of theirs.
        ("NVIDIA L40", "A100"),
        ("NVIDIA RTX A1000", "A100"),
    ],
)
def test_a_gpu_is_found_by_its_name(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_at(torch.device("cuda")) is DEVICES[expected]
