"""Keeps torch from taking cuDNN's attention where its backward may give NaN."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_ISSUE = "https://github.com/pytorch/pytorch/issues/196678"
# PyTorch 2.11 takes cuDNN's kernels where they are wrong; cuDNN 9.26 has right ones (pytorch PR 196861).
_SINCE_TORCH = (2, 11)
_FIXED_IN_CUDNN = 92600
_GPU = (9, 0)
# Lengths of the keys with which it happens: 64 more than a multiple of 128.
_TILE, _REMAINDER = 128, 64


@contextlib.contextmanager
def avoided() -> Iterator[None]:
    """Attention that is traced within takes another kernel than cuDNN's."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def warning(graph: fx.Graph) -> str:
    """Why a graph that dynamo traced is to run without cuDNN's attention; empty where nothing speaks against it.

    What goes wrong are gradients of the queries under a mask, for some lengths, where a query's scores are all very
    negative. A symbolic length may be such a length in a later batch.
    """
    version = torch.backends.cudnn.version()
    if version is None or version >= _FIXED_IN_CUDNN or _torch_version() < _SINCE_TORCH:
        return ""
    if not torch.backends.cuda.cudnn_sdp_enabled() or not any(map(_may_fail, graph.nodes)):
        return ""
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"attention with a mask runs without cuDNN {number}, whose backward may give NaN on this GPU ({_ISSUE})"


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _may_fail(node: fx.Node) -> bool:
    if node.target is not torch.nn.functional.scaled_dot_product_attention:
        return False
    arguments = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False)) | dict(node.kwargs)
    query, key = _example(arguments["query"]), _example(arguments["key"])
    if arguments.get("attn_mask") is None or query is None or key is None:
        return False
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    length = key.shape[-2]
    return _is_affected(query.device) and (not isinstance(length, int) or length % _TILE == _REMAINDER)


def _is_affected(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == _GPU


def _example(argument: Any) -> torch.Tensor | None:
    """The fake tensor that dynamo traced with."""
    found = argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None
