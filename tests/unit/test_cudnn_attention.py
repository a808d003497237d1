"""Which graphs run without cuDNN attention. `tests/cuda` trains one."""

import pytest
import torch
from torch import fx

from optimum_memopt.engines.torch_compat import kernels
from optimum_memopt.engines.torch_compat.dynamo import fake_tensors


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)


def graph(
    length: int = 192,
    mask: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    by_name: bool = True,
) -> fx.Graph:
    """Returns a graph with one attention call as dynamo traces it."""
    made = fx.Graph()
    q, k, v, given = (made.placeholder(name) for name in ("q", "k", "v", "mask"))
    with fake_tensors():
        for node in (q, k, v):
            node.meta["example_value"] = torch.empty(2, 4, length, 64, dtype=dtype, device=device)
    arguments, named = (q, k, v), {"attn_mask": given if mask else None}
    if not by_name:
        arguments, named = (q, k, v, given), {}
    made.call_function(torch.nn.functional.scaled_dot_product_attention, arguments, named)
    return made


@pytest.mark.parametrize("length", [64, 192, 704])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mask_and_a_length_that_fails(length, dtype):
    said = kernels.cudnn_attention_warning(graph(length, dtype=dtype))
    assert "without cuDNN 9.20.0" in said and "issues/196678" in said and "\n" not in said
    assert kernels.cudnn_attention_warning(graph(length, by_name=False)) == said


def test_a_symbolic_length_is_guarded_on():
    """Lengths that fail get a graph of their own."""
    found = []

    def backend(module, inputs):
        values = (node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder"))
        (length,) = (value.shape[0] for value in values if isinstance(value, torch.Tensor))
        found.append(kernels.cudnn_may_give_nan((9, 0), length))
        return module

    torch._dynamo.reset()
    doubled = torch.compile(lambda tensor: 2 * tensor, backend=backend, dynamic=True)
    for length in (256, 320, 384, 448, 200):
        doubled(torch.ones(length))
    assert found == [False, True]


@pytest.mark.parametrize(
    "harmless",
    [{"length": 512}, {"length": 100}, {"mask": False}, {"dtype": torch.float32}, {"device": "cpu"}],
    ids=str,
)
def test_other_calls_keep_cudnn(harmless):
    assert kernels.cudnn_attention_warning(graph(**harmless)) == ""


@pytest.mark.parametrize(
    "owner, name, value",
    [
        (torch, "__version__", "2.10.0"),
        (torch.cuda, "get_device_capability", lambda device: (10, 0)),
        (torch.backends.cudnn, "version", lambda: 92600),
        (torch.backends.cudnn, "version", lambda: None),
        (torch.backends.cuda, "cudnn_sdp_enabled", lambda: False),
        (torch.version, "hip", "7.0"),
    ],
)
def test_elsewhere_cudnn_is_right_or_not_taken(monkeypatch, owner, name, value):
    assert kernels.cudnn_attention_warning(graph())
    monkeypatch.setattr(owner, name, value)
    assert kernels.cudnn_attention_warning(graph()) == ""


def test_the_switch_is_given_back():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with pytest.raises(KeyError), kernels.without_cudnn_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        raise KeyError
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
