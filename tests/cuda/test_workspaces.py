"""Workspaces of operators against torch's allocator. No kernel results are needed, so a stand-in device suffices."""

import itertools
from collections.abc import Callable

import pytest
import torch

from optimum_memopt.engines.simulator.workspaces import operator_workspace
from optimum_memopt.engines.torch_compat import fused_lm_head
from optimum_memopt.engines.torch_compat.kernels import multiprocessors_of

aten = torch.ops.aten


def excess(call: Callable[[], object]) -> int:
    """Returns the bytes that a call requests at its peak beyond those it leaves."""
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    stats = torch.cuda.memory_stats()
    del kept
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]


def predicted(operator: Callable[..., object], *arguments: object) -> int:
    found = operator_workspace(operator, arguments, operator(*arguments), multiprocessors_of(torch.device("cuda", 0)))
    return int(found)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype)


SUMS = [
    *(((rows, width), [0]) for rows in (64, 512, 2048, 8192) for width in (1, 2, 100, 768, 770, 771, 3072, 32000)),
    *(((8, 256, width), [0, 1]) for width in (768, 1000)),
    *(((8, 256, 3, 64), [0, 1]), ((8, 12, 256, 256), [0]), ((8, 12, 256, 256), [0, 1]), ((32, 128, 768), [1])),
    *(((2048, 768), [1]), ((100_000,), [0]), ((1_000_000,), [0]), ((16, 4096, 64), [2]), ((3, 5, 7), [0, 2])),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape, dims", SUMS, ids=str)
def test_sums(shape: tuple[int, ...], dims: list[int], dtype: torch.dtype) -> None:
    source = tensor(*shape, dtype=dtype)
    measured = excess(lambda: aten.sum.dim_IntList(source, dims, True))
    assert predicted(aten.sum.dim_IntList, source, dims, True) == measured


def test_some_sums_hold_more_than_they_read() -> None:
    """Some sums hold more than they read, so the cases above are not all zero."""
    source = tensor(2048, 8192)
    assert excess(lambda: aten.sum.dim_IntList(source, [0], True)) > source.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_backward(dtype: torch.dtype) -> None:
    gradient, output = tensor(4, 8, 64, 64, dtype=dtype), tensor(4, 8, 64, 64, dtype=dtype)
    arguments = gradient, output, -1, dtype
    assert predicted(aten._softmax_backward_data.default, *arguments) == gradient.nbytes
    assert excess(lambda: aten._softmax_backward_data.default(*arguments)) == gradient.nbytes


@pytest.mark.parametrize("rows, indices", [(8192, 8192), (600, 4096), (50265, 16384), (8192, 2048)])
def test_embedding_backward(rows: int, indices: int) -> None:
    arguments = tensor(indices, 768), torch.zeros(indices, dtype=torch.int64).cuda(), rows, -1, False
    measured = excess(lambda: aten.embedding_dense_backward.default(*arguments))
    assert predicted(aten.embedding_dense_backward.default, *arguments) == pytest.approx(measured, rel=0.001, abs=1024)


SHAPES = [
    (8, 12, 256, 256, 64),
    (2, 4, 200, 200, 64),
    (2, 4, 512, 128, 64),
    (2, 4, 256, 256, 128),
    (2, 4, 256, 256, 96),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_efficient_attention(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, queries, keys, width = shape
    query, key, value = (tensor(batch, heads, n, width, dtype=dtype) for n in (queries, keys, keys))
    out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.1, False)
    operator = aten._scaled_dot_product_efficient_attention_backward.default
    arguments = torch.empty_like(out), query, key, value, None, out, sums, seed, offset, 0.1, [True] * 3 + [False]
    assert predicted(operator, *arguments) == pytest.approx(excess(lambda: operator(*arguments)), rel=0.02)


@pytest.mark.parametrize("shape, fewer_keys", list(itertools.product(SHAPES, [False, True])), ids=str)
def test_flash_attention(shape: tuple[int, ...], fewer_keys: bool) -> None:
    batch, heads, queries, keys, width = shape
    of_keys = heads // 2 if fewer_keys else heads
    query = tensor(batch, heads, queries, width, dtype=torch.bfloat16)
    key, value = (tensor(batch, of_keys, keys, width, dtype=torch.bfloat16) for _ in range(2))
    out, sums, *rest = aten._scaled_dot_product_flash_attention(query, key, value, 0.1, True)
    of_q, of_k, most_q, most_k, seed, offset, _ = rest
    operator = aten._scaled_dot_product_flash_attention_backward.default
    tensors = torch.empty_like(out), query, key, value, out, sums
    arguments = *tensors, of_q, of_k, most_q, most_k, 0.1, True, seed, offset
    assert predicted(operator, *arguments) == pytest.approx(excess(lambda: operator(*arguments)), rel=0.01)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [32_000, 65_536, 100_000])
@pytest.mark.parametrize("tokens", [2048, 4096, 12_288])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_the_head_of_trls_trainers(
    autocast: torch.dtype | None, dtype: torch.dtype, words: int, tokens: int, trained: bool, monkeypatch
) -> None:
    pytest.importorskip("trl")
    # As if every token had a label: a stand-in counts none.
    monkeypatch.setattr(fused_lm_head, "_picked", lambda each, scored: each.clone())
    monkeypatch.setattr(fused_lm_head, "_spread", lambda each, scored: torch.empty_like(each))
    hidden, weight = tensor(tokens, 256, dtype=dtype), tensor(words, 256, dtype=dtype)
    labels = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    given = (hidden, weight, None, labels, 1.0, 32_768, None, 1.0, "entropy", autocast)
    _, log_z, entropy, *_ = fused_lm_head.label_log_probs(*given)
    back = (tensor(tokens), None, hidden, weight, None, labels, log_z, entropy, 1.0, 32_768, None, 1.0, autocast)
    of_both = torch.ops.optimum_memopt
    for operator, arguments in (
        (of_both.label_log_probs, given),
        (of_both.label_log_probs_backward, (*back, [True, trained, False])),
    ):
        found = predicted(operator.default, *arguments)
        assert found == pytest.approx(excess(lambda: operator(*arguments)), rel=0.01)  # noqa: B023
