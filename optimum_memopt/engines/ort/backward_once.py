"""ONNX Runtime runs each backward once and builds no graph for its gradients: refuse anything that needs more."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from optimum_memopt.errors import MemOptError


def single_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the backward of ORT's autograd function with an error where gradients would silently be lost.

    Args:
        backward: deletes `ctx.run_info.state` when it has run (onnxruntime-training 1.19.2, `_training_manager.py`).

    Raises:
        MemOptError: `create_graph=True` (the gradients would have no graph, so a penalty on them would have no
            effect), or a second backward of one forward.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # Autograd enables gradients during a backward only for create_graph.
        if torch.is_grad_enabled():
            raise MemOptError(
                "backward with create_graph=True through ONNX Runtime, whose gradients have no graph; leave the "
                "engine out for a loss that depends on gradients"
            )
        if not hasattr(ctx.run_info, "state"):
            raise MemOptError(
                "a second backward of one forward (retain_graph=True) through ONNX Runtime, which frees its "
                "activations in the first; add up the losses and call backward() once, or use --memory_opt_engine "
                "compile"
            )
        return backward(ctx, *gradients)

    return checked
