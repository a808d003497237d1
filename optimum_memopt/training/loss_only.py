"""Whether a training forward was called for its loss alone, so that no gradient can come back through another output.

Stock `Trainer.compute_loss` takes the loss out of the model's outputs and drops the rest when it returns (transformers
5.23). Asked at each forward, since a subclass, an assignment to the Trainer and a hook may all come later.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

# Code between `Trainer.compute_loss` and the model's forward that hands the outputs on and reads no values of them:
# wrappers of modules, autocast, context managers used as decorators.
_HANDS_ON = frozenset({"optimum_memopt", "torch", "accelerate", "deepspeed", "contextlib"})
# Hooks of a module that are given its outputs or the gradients of its outputs, on the module and on all of them.
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
# Their hooks look at memory or time, or wait for the gradient of whatever the loss is made of.
_HOOKS_THAT_ADD_NOTHING = frozenset({"optimum_memopt", "deepspeed"})


def is_called_for_loss_only() -> bool:
    """Whether the code that runs now was called by stock `Trainer.compute_loss`, which returns the model's own loss
    and nothing else, and no hook on the model or on a wrapper around it sees the other outputs.

    Costs 10 microseconds. False wherever something unknown is in between.
    """
    caller = _first_that_reads(sys._getframe(1))
    if caller is None or caller.f_code.co_name != "compute_loss" or _module(caller) != "transformers.trainer":
        return False
    given = caller.f_locals
    trainer = given["self"]
    if given["return_outputs"] or trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return False
    return not any(_is_read(hook) for hook in _hooks(given["model"]))


def _first_that_reads(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _package(_module(frame)) in _HANDS_ON:
        frame = frame.f_back
    return frame


def _hooks(model: torch.nn.Module) -> Iterator[Any]:
    """Of the model, of the wrappers around it (DDP and DeepSpeed call what they wrap `module`), and of all modules."""
    for name in _GLOBAL_HOOKS:
        yield from getattr(torch_module, name).values()
    inner: Any = model
    while isinstance(inner, torch.nn.Module):
        for name in _HOOKS:
            yield from getattr(inner, name).values()
        inner = getattr(inner, "module", None)


def _is_read(hook: Any) -> bool:
    return _package(getattr(hook, "__module__", None)) not in _HOOKS_THAT_ADD_NOTHING


def _module(frame: FrameType) -> Any:
    return frame.f_globals.get("__name__")


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
