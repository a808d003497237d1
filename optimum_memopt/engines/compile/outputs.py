"""A forward whose outputs beside the loss are out of the graph.

AOTAutograd feeds a gradient of zeros for every output that has one and that nobody went back from: for the logits of a
language model two buffers of their size, which plain PyTorch does not take.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch


def loss_alone(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with all outputs but the first detached, where that is the loss: a tensor of one number."""
    if isinstance(forward, types.MethodType):
        return types.MethodType(loss_alone(forward.__func__), forward.__self__)

    def detaching(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        if isinstance(outputs, Mapping):
            if _is_loss(outputs.get("loss")):
                return type(outputs)(**{name: _detached(one, name == "loss") for name, one in outputs.items()})
        elif isinstance(outputs, tuple) and outputs and _is_loss(outputs[0]):
            return tuple(_detached(one, index == 0) for index, one in enumerate(outputs))
        return outputs

    return detaching


def _is_loss(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _detached(value: Any, is_loss: bool) -> Any:
    if is_loss:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(_detached(one, False) for one in value) if type(value) is tuple else value
