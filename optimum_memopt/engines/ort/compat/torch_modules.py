"""Private names of torch's modules and tensors that have no public counterpart without a cost at each step."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from optimum_memopt.errors import UnsupportedModelError

# Attributes that every module has, except `training`: torch's own bookkeeping.
MODULE_FIELDS = frozenset(vars(torch.nn.Module())) - {"training"}
# Of a module: its hooks, and how they are called.
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
DROPOUTS = torch.nn.modules.dropout._DropoutNd


# A module's own dicts by name, and the set of names of its non-persistent buffers.
children, parameters, buffers = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_buffers")
non_persistent_buffers = attrgetter("_non_persistent_buffers_set")


def checkpoint_function(module: torch.nn.Module) -> Any:
    """The function that checkpoints a module's layers, of transformers (5.23): a partial of torch's; else None."""
    return getattr(module, "_gradient_checkpointing_func", None)


@contextlib.contextmanager
def preserve_training_modes(module: torch.nn.Module) -> Iterator[None]:
    """ORTModule() and torch.onnx.export set every submodule to the root's training mode; restore their own."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


@contextlib.contextmanager
def record_autograd_functions() -> Iterator[list[str]]:
    """Record which `torch.autograd.Function`s are applied, except ORT's own, which wrap every model.

    Without the extensions an export inlines them and silently drops a backward that is not the derivative of the
    forward.
    """
    seen: list[str] = []
    original = torch.autograd.Function.__dict__["apply"]
    thread = threading.get_ident()

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        name, is_own = cls.__qualname__, not cls.__module__.startswith("onnxruntime.")
        if is_own and name not in seen and threading.get_ident() == thread:
            seen.append(name)
        return original.__get__(None, cls)(*args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield seen


@contextlib.contextmanager
def check_checkpointed_functions() -> Iterator[None]:
    """Refuse checkpointed functions that hold tensors.

    A checkpointed layer is exported as a PythonOp that calls the function object of the export. Its tensor arguments
    come from the graph, but tensors held by a partial or a closure stay those of the first batch, as in transformers'
    layers that get masks or position embeddings by keyword (`GradientCheckpointingLayer`).

    Raises:
        UnsupportedModelError: such a function is checkpointed.
    """
    function_class = torch.utils.checkpoint.CheckpointFunction

    def apply(cls: type, function: Callable[..., Any], *args: Any) -> Any:
        if names := _held_tensors(function):
            raise UnsupportedModelError(
                f"its checkpointed layers get {', '.join(names)} other than as positional arguments, which the export "
                "would freeze at their values of the first batch; turn activation checkpointing off"
            )
        return super(function_class, cls).apply(function, *args)  # type: ignore[misc]

    with mock.patch.object(function_class, "apply", classmethod(apply)):
        yield


def _held_tensors(function: Callable[..., Any]) -> list[str]:
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held |= {**function.keywords, **{f"argument {index}": value for index, value in enumerate(function.args)}}
        function = function.func
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return [
        name
        for name, value in {**held, **variables}.items()
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
    ]
