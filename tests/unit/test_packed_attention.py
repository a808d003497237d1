"""Attention within parts of a packed row, against transformers' attention of each part."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention, eager_attention_forward

from optimum_memopt.engines.torch_compat.attention import attention_of_parts, equal_parts, packed_attention

HEADS, WIDTH, SCALE = 2, 8, 8**-0.5


def given(tokens: int = 15, seed: int = 0) -> list[torch.Tensor]:
    """Returns views, as queries, keys and values of one projection are."""
    made = torch.Generator().manual_seed(seed)
    tensors = torch.randn(3, tokens, HEADS, WIDTH, generator=made)
    return [tensor.transpose(0, 1)[None].requires_grad_() for tensor in tensors.unbind()]


def by_parts(tensors: list[torch.Tensor], lengths: list[int], is_fused: bool) -> torch.Tensor:
    attend = sdpa_attention_forward if is_fused else eager_attention_forward
    module = VisionAttention.__new__(VisionAttention)
    torch.nn.Module.__init__(module)
    module.num_key_value_groups, module.is_causal = 1, False
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in tensors), strict=True)
    return torch.cat([attend(module, *part, None, scaling=SCALE, is_causal=False)[0] for part in parts], dim=1)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[15], [4, 11], [1, 6, 8], [5, 5, 5]])
def test_values_and_gradients_are_those_of_each_part(lengths, dtype, is_fused):
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = []
    for run in (
        lambda tensors: attention_of_parts(*tensors, bounds, SCALE, is_fused),
        lambda tensors: by_parts(tensors, lengths, is_fused),
    ):
        tensors = given()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            result = run(tensors)
        found.append((result, *torch.autograd.grad(result.float().square().sum(), tensors)))
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype is expected.dtype
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_operator_is_one_for_tracers(is_fused):
    bounds = torch.tensor([0, 4, 15], dtype=torch.int32)
    torch.library.opcheck(packed_attention, (*given(), bounds, SCALE, is_fused))


def test_parts_that_are_not_as_long_as_the_row():
    with pytest.raises(RuntimeError, match="split_sizes to sum exactly to 15"):
        packed_attention(*given(), torch.tensor([0, 4, 14]), SCALE, True)


def test_equal_parts():
    assert equal_parts(torch.zeros(4, dtype=torch.int32), 15).tolist() == [0, 5, 10, 15]
