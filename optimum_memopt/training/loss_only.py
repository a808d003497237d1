"""Who may read a training forward's outputs beside the loss.

Stock `Trainer.compute_loss` takes the loss out of the model's outputs and drops the rest when it returns (transformers
5.23). Asked at each forward, since a subclass, an assignment to the Trainer and a hook may all come later.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from optimum_memopt.compat import global_output_hooks, output_hooks

# Code between `Trainer.compute_loss` and the model's forward that returns the outputs and reads no values of them:
# wrappers of modules, autocast, context managers used as decorators.
_PASSES_THROUGH = frozenset({"optimum_memopt", "torch", "accelerate", "deepspeed", "contextlib"})
# Their hooks look at memory or time, or wait for the gradient of whatever the loss is made of.
_HOOKS_THAT_ADD_NOTHING = frozenset({"optimum_memopt", "deepspeed"})


def outputs_read_by() -> str:
    """Who may read more of the model's outputs than the loss; empty when nobody does.

    Nobody does where the code that runs now was called by stock `Trainer.compute_loss`, which returns the model's own
    loss and nothing else, and no hook on the model or on a wrapper around it sees the other outputs.

    Costs 10 microseconds.
    """
    caller = _first_that_reads(sys._getframe(1))
    if caller is None:
        return "the training loop"
    if caller.f_code.co_name != "compute_loss" or _module(caller) != "transformers.trainer":
        return caller.f_code.co_qualname if hasattr(caller.f_code, "co_qualname") else caller.f_code.co_name
    given = caller.f_locals
    trainer = given["self"]
    if given["return_outputs"]:
        return f"{type(trainer).__name__}, which asks compute_loss for the outputs,"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    if trainer.label_smoother is not None:
        return "the Trainer's label smoother"
    if any(_is_read(hook) for hook in _hooks(given["model"])):
        return "a forward hook"
    return ""


def _first_that_reads(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _package(_module(frame)) in _PASSES_THROUGH:
        frame = frame.f_back
    return frame


def _hooks(model: torch.nn.Module) -> Iterator[Any]:
    """Of the model, of the wrappers around it (DDP and DeepSpeed call what they wrap `module`), and of all modules."""
    yield from global_output_hooks()
    inner: Any = model
    while isinstance(inner, torch.nn.Module):
        yield from output_hooks(inner)
        inner = getattr(inner, "module", None)


def _is_read(hook: Any) -> bool:
    return _package(getattr(hook, "__module__", None)) not in _HOOKS_THAT_ADD_NOTHING


def _module(frame: FrameType) -> Any:
    return frame.f_globals.get("__name__")


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
