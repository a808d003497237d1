"""Levers of ORT that crash or act on the whole process, put right for one ORTModule; `session.py` applies them.

All of onnxruntime-training 1.19.2. Each is a context for the time of one call into ORT.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves

from optimum_memopt.engines.ort.compat import ORTMODULE, replaced
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.errors import UnsupportedModelError

_EFFICIENT_ATTENTION = f"{ORTMODULE}.graph_optimizers._aten_attn"
_TRITON = "onnxruntime.training.ort_triton"
_FLASH_ATTENTION = f"{_TRITON}.kernel._flash_attn"


@contextlib.contextmanager
def label_sparsity(transition_manager: type, enabled: bool) -> Iterator[None]:
    """ORT asks the switch for embeddings where it means the one for labels, and then runs through the None that "off"
    gives (_graph_transition_manager.py, `_export_model`: `'NoneType' object is not iterable`)."""
    original = transition_manager.__dict__["_add_check_label_sparsity_hook"].__func__

    def add_hooks(_: bool, *others: Any) -> list[Any]:
        return original(enabled, *others) or []

    with replaced(transition_manager, "_add_check_label_sparsity_hook", staticmethod(add_hooks)):
        yield


@contextlib.contextmanager
def gradient_management(device: Callable[[], torch.device]) -> Iterator[None]:
    """ORT passes the parameters where the device belongs (_graph_transition_manager.py, `_post_export_process`:
    `zeros(): argument 'device' must be torch.device, not dict`)."""
    module = importlib.import_module(f"{ORTMODULE}._mem_efficient_grad_mgmt")
    original = module.post_processing_enable_mem_efficient_training

    def with_device(model: Any, named_parameters: Any, _: Any) -> Any:
        return original(model, named_parameters, device())

    with replaced(module, original.__name__, with_device):
        yield


@contextlib.contextmanager
def checkpointed_layers_checked() -> Iterator[None]:
    """A checkpointed layer becomes a PythonOp that calls the very function object it was exported with. Tensors that
    reach it as arguments are the graph's; those inside the function would stay the first batch's for ever, as in
    transformers' layers that get masks or position embeddings by keyword (`GradientCheckpointingLayer`).

    Raises:
        UnsupportedModelError: when such a function is checkpointed.
    """
    kind = torch.utils.checkpoint.CheckpointFunction

    def apply(cls: type, function: Callable[..., Any], *args: Any) -> Any:
        if names := _tensors_inside(function):
            raise UnsupportedModelError(
                f"its checkpointed layers get {', '.join(names)} other than as positional arguments, which the export "
                "would keep as they are in the first batch; leave activation checkpointing out"
            )
        return super(kind, cls).apply(function, *args)

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        del kind.apply


def _tensors_inside(function: Callable[..., Any]) -> list[str]:
    """Names of the tensors that a partial or a closure holds."""
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held |= {**function.keywords, **{f"argument {index}": value for index, value in enumerate(function.args)}}
        function = function.func
    variables = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    return [
        name
        for name, value in (held | variables).items()
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
    ]


@contextlib.contextmanager
def graph_optimizers(options: OrtOptions) -> Iterator[None]:
    """ORT registers its graph rewrites when their modules are imported, for all models from then on; here a model gets
    those that its options name, and those that somebody else registered."""
    wanted = {
        _EFFICIENT_ATTENTION: options.ort_efficient_attention,
        _FLASH_ATTENTION: options.ort_flash_attention,
        f"{_TRITON}.kernel._slice_scel": options.ort_triton,
    }
    for module in (_EFFICIENT_ATTENTION, _FLASH_ATTENTION):
        if wanted[module]:
            importlib.import_module(module)
    registry = importlib.import_module(f"{ORTMODULE}.graph_optimizer_registry").GraphOptimizerRegistry
    chosen = {
        target: [entry for entry in entries if wanted.get(entry[0].__module__, True)]
        for target, entries in registry._OPTIMIZER_FUNCS.items()
    }
    with replaced(registry, "_OPTIMIZER_FUNCS", chosen):
        yield
