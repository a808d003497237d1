"""ONNX Runtime runs a backward once and gives gradients that have none themselves: what asks for more is refused."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from optimum_memopt.errors import MemOptError


def refuse_more(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of ORT's autograd function, with an error in place of a gradient that would be lost.

    Args:
        backward: deletes `ctx.run_info.state` when it has run (onnxruntime-training 1.19.2, `_training_manager.py`).

    Raises:
        MemOptError: `create_graph=True` (the gradients would have no graph, and a penalty on them no effect), or a
            second backward of one forward.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        # Autograd enables gradients in a backward for create_graph alone.
        if torch.is_grad_enabled():
            raise MemOptError(
                "backward with create_graph=True through ONNX Runtime, whose gradients have no graph; leave the "
                "engine out for a loss that is made of gradients"
            )
        if not hasattr(ctx.run_info, "state"):
            raise MemOptError(
                "a second backward of one forward (retain_graph=True) through ONNX Runtime, which frees its "
                "activations in the first; add up the losses and go back once, or use --memory_opt_engine compile"
            )
        return backward(ctx, *gradients)

    return once
