"""Patches for ORT options that crash or act on the whole process; `session.py` applies them to one ORTModule.

All of onnxruntime-training 1.19.2. Each is a context manager around one call into ORT.
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

from optimum_memopt.engines.ort.compat import ORTMODULE, patched
from optimum_memopt.engines.ort.options import OrtOptions
from optimum_memopt.errors import UnsupportedModelError

_EFFICIENT_ATTENTION = f"{ORTMODULE}.graph_optimizers._aten_attn"
_TRITON = "onnxruntime.training.ort_triton"
_FLASH_ATTENTION = f"{_TRITON}.kernel._flash_attn"


@contextlib.contextmanager
def fix_label_sparsity_switch(transition_manager: type, enabled: bool) -> Iterator[None]:
    """ORT reads the switch for embedding sparsity where it means label sparsity, and then iterates over the None that
    "off" returns (_graph_transition_manager.py, `_export_model`: `'NoneType' object is not iterable`)."""
    original = transition_manager.__dict__["_add_check_label_sparsity_hook"].__func__

    def add_hooks(_: bool, *others: Any) -> list[Any]:
        return original(enabled, *others) or []

    with patched(transition_manager, "_add_check_label_sparsity_hook", staticmethod(add_hooks)):
        yield


@contextlib.contextmanager
def fix_gradient_management_device(device: Callable[[], torch.device]) -> Iterator[None]:
    """ORT passes the parameters in place of the device (_graph_transition_manager.py, `_post_export_process`:
    `zeros(): argument 'device' must be torch.device, not dict`)."""
    module = importlib.import_module(f"{ORTMODULE}._mem_efficient_grad_mgmt")
    original = module.post_processing_enable_mem_efficient_training

    def with_device(model: Any, named_parameters: Any, _: Any) -> Any:
        return original(model, named_parameters, device())

    with patched(module, original.__name__, with_device):
        yield


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

    function_class.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        del function_class.apply


def _held_tensors(function: Callable[..., Any]) -> list[str]:
    """Names of the tensors that a partial or a closure holds."""
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


@contextlib.contextmanager
def select_graph_optimizers(options: OrtOptions) -> Iterator[None]:
    """Apply only the graph rewrites that the options of this model name, and those that other code registered: ORT
    registers a rewrite when its module is imported, for every model of the process."""
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
    with patched(registry, "_OPTIMIZER_FUNCS", chosen):
        yield
