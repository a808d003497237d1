"""Detaches a forward's outputs beside the loss.

AOTAutograd feeds a gradient of zeros to every output that requires grad and got none: for the logits of a language
model two buffers of their size, which plain PyTorch does not allocate.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from optimum_memopt.errors import MemOptError

# Takes an output and its name.
Change = Callable[[torch.Tensor, str], torch.Tensor]


def with_detached_outputs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with all outputs but the first detached, where that is the loss: a tensor of one number."""
    return _then(forward, lambda outputs: _beside_loss(outputs, _detach))


def without_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` without the logits among its outputs, where the first is the loss."""
    return _then(forward, _drop_logits)


def _then(forward: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    """`forward`, whose outputs are changed; a method stays one."""
    if isinstance(forward, types.MethodType):
        return types.MethodType(_then(forward.__func__, change), forward.__self__)

    def changing(*args: Any, **kwargs: Any) -> Any:
        return change(forward(*args, **kwargs))

    return changing


def _drop_logits(outputs: Any) -> Any:
    if isinstance(outputs, Mapping):
        if _is_loss(outputs.get("loss")):
            return type(outputs)(**{name: None if name.endswith("logits") else outputs[name] for name in outputs})
    elif isinstance(outputs, tuple) and len(outputs) > 1 and _is_loss(outputs[0]):
        return (outputs[0], None, *outputs[2:])
    return outputs


def refusing_gradients(outputs: Any) -> Any:
    """Let detached outputs raise when they get a gradient.

    They require grad, as those of the plain forward do, but no graph is behind them: a loss computed from them would
    silently train without its gradient.
    """
    return _beside_loss(outputs, _refuse_gradient)


def _beside_loss(outputs: Any, change: Change) -> Any:
    if isinstance(outputs, Mapping):
        if _is_loss(outputs.get("loss")):
            values = {name: _changed(value, name, change) for name, value in outputs.items() if name != "loss"}
            return type(outputs)(**{**outputs, **values})
    elif isinstance(outputs, tuple) and outputs and _is_loss(outputs[0]):
        return (outputs[0], *(_changed(value, str(index), change) for index, value in enumerate(outputs[1:], 1)))
    return outputs


def _is_loss(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _changed(value: Any, name: str, change: Change) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value, name)
    return tuple(_changed(inner, name, change) for inner in value) if type(value) is tuple else value


def _detach(value: torch.Tensor, name: str) -> torch.Tensor:
    return value.detach()


def _refuse_gradient(value: torch.Tensor, name: str) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    # What the forward returns may be one of its inputs.
    leaf = value.detach().requires_grad_()
    leaf.register_hook(functools.partial(_refuse, name))
    return leaf


def _refuse(name: str, gradient: torch.Tensor | None) -> None:
    # DDP passes outputs through its own autograd function, whose backward returns None for those that nobody read.
    if gradient is None:
        return
    raise MemOptError(
        f"a gradient flowed back to the model's output {name!r}, which is detached because Trainer's own compute_loss "
        "reads only the loss; compute such a loss in compute_loss of a Trainer subclass or in compute_loss_func"
    )
