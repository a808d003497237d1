"""A forward whose outputs beside the loss are out of the graph.

AOTAutograd feeds a gradient of zeros for every output that has one and that nobody went back from: for the logits of a
language model two buffers of their size, which plain PyTorch does not take.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from optimum_memopt.errors import MemOptError

# Is given an output and its name.
Change = Callable[[torch.Tensor, str], torch.Tensor]


def loss_only(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` with all outputs but the first detached, where that is the loss: a tensor of one number."""
    if isinstance(forward, types.MethodType):
        return types.MethodType(loss_only(forward.__func__), forward.__self__)

    def detaching(*args: Any, **kwargs: Any) -> Any:
        return _beside_loss(forward(*args, **kwargs), _detach)

    return detaching


def refusing_gradients(outputs: Any) -> Any:
    """The outputs of a `loss_only` forward, of which those beside the loss raise when a gradient comes back to them.

    They require grad, as those of the plain forward do, but no graph is behind them: a loss made of them would train
    without its gradient otherwise.
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
    # DDP passes outputs through a function of its own, whose backward hands None back for those that nobody read.
    if gradient is None:
        return
    raise MemOptError(
        f"a gradient came back to the model's output {name!r}, which is out of the graph because Trainer's own "
        "compute_loss reads the loss alone; make such a loss in compute_loss of a Trainer subclass or in "
        "compute_loss_func"
    )
