"""Predicted workspaces of CPU operators against torch's allocator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import allocated

from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat.kernels import has_instructions_for, onednn_multiplies

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def held(operator: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    peak, left, _ = allocated(lambda: operator(*arguments))
    return peak - left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_tokens", [True, False], ids=["heads of a token", "tokens of a head"])
@pytest.mark.parametrize(
    ("queries", "keys", "head"),
    [(20, 50, 16), (48, 48, 16), (200, 100, 64), (520, 511, 80), (800, 600, 16), (1024, 1024, 128)],
)
def test_attention(queries: int, keys: int, head: int, of_tokens: bool, dtype: torch.dtype) -> None:
    """Each thread has a block; of the row sums, at most a kibibyte per thread, the allocator may see one thread's."""
    if onednn_multiplies(dtype) and torch.cpu._is_amx_tile_supported():
        pytest.skip("what oneDNN packs for AMX is not known")
    query, gradient = (torch.randn(2, 4, queries, head, dtype=dtype) for _ in range(2))
    key, value = (torch.randn(2, 4, keys, head, dtype=dtype) for _ in range(2))
    if of_tokens:
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    forward = (query, key, value)
    outputs = _FORWARD(*forward)
    backward = (gradient, *forward, *outputs, 0.0, False)
    for operator, arguments in ((_FORWARD, forward), (_BACKWARD, backward)):
        found = operator_workspace(operator.default, arguments, operator(*arguments), None)
        slack = 1024 * (torch.get_num_threads() - 1)
        most = torch.get_num_threads() * _onednn_may_hold_less(keys, dtype) if operator is _BACKWARD else 0
        assert -slack <= int(found) - held(operator, arguments) <= slack + most


def _onednn_may_hold_less(keys: int, dtype: torch.dtype) -> int:
    """Returns the bytes by which oneDNN may hold less (see `cpu_workspaces._onednn_buffers`)."""
    if not onednn_multiplies(dtype):
        return 0
    if not has_instructions_for(dtype):
        return 4096
    return 96 * 1024 if min(keys, 512) > 256 and min(keys, 512) % 2 else 0


def operands(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Returns operator calls that mix this dtype with float32 or int64."""
    own, other = torch.randn(8, 55, 48).to(dtype), torch.randn(8, 55, 48)
    index = torch.randint(0, 48, (1, 55, 48)).expand(8, 55, 48)
    aten = torch.ops.aten
    return {
        "add": (aten.add.Tensor, own, other),
        "a number": (aten.mul.Tensor, own, torch.tensor(2.0)),
        "maximum": (aten.maximum.default, other, own),
        "comparison": (aten.lt.Tensor, own, other),
        "comparison of a row": (aten.eq.Tensor, index[0], own),
        "where": (aten.where.self, own > 0, own, other),
        "gather": (aten.gather.default, own, -1, index),
        "scatter": (aten.scatter.src, own, -1, index, own),
        "scatter value": (aten.scatter.value, own, -1, index, 1.0),
        "scatter_add": (aten.scatter_add.default, own, -1, index, own),
        "sum": (aten.sum.dim_IntList, own, [-1]),
        "sum of truths": (aten.sum.default, own > 0),
        "mean": (aten.mean.dim, own, [-1]),
        "mean of all": (aten.mean.default, own),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(operands(torch.float32)))
def test_casts(name: str, dtype: torch.dtype) -> None:
    """Casts are counted, but a few scalars, such as one for each dimension, are not."""
    operator, *arguments = operands(dtype)[name]
    found = operator_workspace(operator, arguments, operator(*arguments), None)
    assert int(found) == pytest.approx(held(operator, tuple(arguments)), rel=0, abs=128)


@pytest.mark.parametrize("of_input", [False, True], ids=["input", "transposed input"])
@pytest.mark.parametrize("of_gradient", [False, True], ids=["gradient", "transposed gradient"])
def test_layer_norm(of_input: bool, of_gradient: bool) -> None:
    """Noncontiguous inputs are copied; row sums, a kibibyte per thread, are not counted."""
    given, gradient = (
        torch.randn(64, 96, 48) if not is_transposed else torch.randn(96, 64, 48).transpose(0, 1)
        for is_transposed in (of_input, of_gradient)
    )
    weight, aten = torch.randn(48), torch.ops.aten
    forward = (given, [48], weight, weight, 1e-5)
    _, mean, deviation = aten.native_layer_norm(*forward)
    backward = (gradient, given, [48], mean, deviation, weight, weight, [True, True, True])
    for operator, arguments in ((aten.native_layer_norm, forward), (aten.native_layer_norm_backward, backward)):
        found = operator_workspace(operator.default, arguments, operator(*arguments), None)
        slack = 1024 * torch.get_num_threads()
        assert int(found) == pytest.approx(held(operator, arguments), rel=0, abs=slack)


@pytest.mark.parametrize("order", ["same", "expanded", "permuted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_gelu(order: str, dtype: torch.dtype) -> None:
    x = torch.randn(8, 55, 48).to(dtype)
    gradients = {
        "same": torch.randn_like(x),
        "expanded": torch.ones((), dtype=dtype).expand_as(x),
        "permuted": torch.randn(48, 55, 8).to(dtype).permute(2, 1, 0),
    }
    arguments = gradients[order], x
    operator = torch.ops.aten.gelu_backward.default
    found = operator_workspace(operator, arguments, operator(*arguments), None)
    assert int(found) == pytest.approx(held(operator, arguments), abs=64)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_binary_cross_entropy(reduction: int) -> None:
    arguments = torch.randn(64, 55), torch.rand(64, 55), None, None, reduction
    operator = torch.ops.aten.binary_cross_entropy_with_logits.default
    found = operator_workspace(operator, arguments, operator(*arguments), None)
    assert int(found) == pytest.approx(held(operator, arguments), abs=64)
