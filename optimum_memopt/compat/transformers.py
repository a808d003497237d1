"""Private names of transformers: the Trainer's batches and outputs, models, activation checkpointing."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import module as torch_module

from optimum_memopt.errors import MemOptError

# Hooks, of a module or global, that receive outputs or gradients of outputs.
_OUTPUT_HOOKS = ("forward_hooks", "backward_hooks", "backward_pre_hooks")

# Trainer's fields; transformers 5.23 has both and warns about the older one.
CHECKPOINTING_FIELDS = ("activation_checkpointing", "gradient_checkpointing")

# The method that returns a Trainer's training sampler, given a dataset (transformers 5.23).
TRAIN_SAMPLER = "_get_train_sampler"

# The method that returns the norm of a step's gradients if clipping is off, given the model (transformers 5.12 to
# 5.24; older versions log no norm then).
GRADIENT_NORM = "_get_grad_norm"


def train_batch_size(trainer: Any) -> int:
    """Returns the batch size of a Trainer's data loader, as last set by `auto_find_batch_size`."""
    return trainer._train_batch_size


def reread_batch_size(trainer: Any) -> None:
    """Reset a Trainer's data loader batch size to that of its arguments (transformers 5.23).

    Gradient accumulation needs no reset: `train()` reads it from the arguments, since Trainer's own accelerator
    accumulates nothing (`create_accelerator_and_postprocess`).
    """
    trainer._train_batch_size = trainer.args.train_batch_size


def collator(trainer: Any, kind: str) -> Callable[[list[Any]], Any]:
    """Returns the collator for `training` or `evaluation`, which drops columns that the model does not take
    (transformers 5.23)."""
    return trainer._get_collator_with_removed_columns(trainer.data_collator, description=kind)


def prepared_inputs(trainer: Any, batch: Any) -> Any:
    """Returns a batch prepared as the Trainer passes it to its model (transformers 5.23)."""
    return trainer._prepare_inputs(batch)


def attention_implementation(config: Any) -> str | None:
    """Returns transformers' name of the attention implementation in a model's config; None if it has none."""
    return getattr(config, "_attn_implementation", None)


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def layer_classes(model: torch.nn.Module) -> frozenset[str]:
    """Returns the names of the layer classes that accelerate shards individually by default; empty if the model
    declares none (transformers 5.23)."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def embeddings(model: torch.nn.Module, kind: str) -> torch.nn.Module | None:
    """Returns the input or output embeddings of a transformers model; None if it has none, or for other models.

    Args:
        kind: `input` or `output`.
    """
    try:
        module: torch.nn.Module | None = getattr(model, f"get_{kind}_embeddings", lambda: None)()
    except NotImplementedError:
        # transformers does not find this model's embeddings by their usual names.
        return None
    return module


def is_mask(name: str) -> bool:
    """True for the name of a transformers input that marks the tokens that are not padding."""
    return name.endswith("attention_mask")


# Packages with code between `Trainer.compute_loss` and the model's forward that returns the outputs without reading
# their values: module wrappers, autocast, context managers used as decorators.
_PASSES_THROUGH = frozenset({"optimum_memopt", "torch", "accelerate", "deepspeed", "contextlib"})

# Packages whose hooks read only memory or time, or wait for gradients of the loss's inputs (FSDP2, DeepSpeed).
_HOOKS_THAT_ADD_NOTHING = frozenset({"optimum_memopt", "deepspeed", "torch"})


def outputs_read_by() -> str:
    """Returns a name for the code that may read outputs other than the loss; empty if none does. Takes 10
    microseconds.

    No code does if the running forward was called by stock `Trainer.compute_loss`, which returns only the model's own
    loss, and no hook of the model or of its wrappers sees the other outputs.
    """
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and _package(_module(caller)) in _PASSES_THROUGH:
        caller = caller.f_back
    if caller is None:
        return "the training loop"
    if caller.f_code.co_name != "compute_loss" or _module(caller) != "transformers.trainer":
        # The qualified name exists from Python 3.11 on.
        return getattr(caller.f_code, "co_qualname", caller.f_code.co_name)
    given = caller.f_locals
    trainer = given["self"]
    if given["return_outputs"]:
        return f"{type(trainer).__name__}, which asks compute_loss for the outputs,"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func"
    if trainer.label_smoother is not None:
        return "the Trainer's label smoother"
    packages = (_package(getattr(hook, "__module__", None)) for hook in _output_hooks(given["model"]))
    return "" if all(package in _HOOKS_THAT_ADD_NOTHING for package in packages) else "a forward hook"


def _output_hooks(model: torch.nn.Module) -> Iterator[Any]:
    """Yields output hooks that are global, or of a model or its wrappers, which hold it as `module` (DDP, DeepSpeed;
    torch 2.13)."""
    for name in _OUTPUT_HOOKS:
        yield from getattr(torch_module, f"_global_{name}").values()
        inner: Any = model
        while isinstance(inner, torch.nn.Module):
            yield from getattr(inner, f"_{name}").values()
            inner = getattr(inner, "module", None)


def _module(frame: FrameType) -> Any:
    return frame.f_globals.get("__name__")


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


@functools.cache
def checkpointing_flag() -> str:
    """Returns Trainer's command-line flag for activation checkpointing."""
    from transformers import TrainingArguments

    return next(f"--{name}" for name in CHECKPOINTING_FIELDS if name in TrainingArguments.__dataclass_fields__)


def checkpoint_layers(model: Any, every: int) -> None:
    """Enable transformers' activation checkpointing of every nth layer.

    Raises:
        MemOptError: the model does not support it, or this transformers can only checkpoint all layers.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise MemOptError(f"{type(model).__name__} does not support activation checkpointing")
    # transformers 5.23 has both methods, and warns about the older one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    elif every == 1:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        raise MemOptError(
            f"checkpointing of every {every} layers needs transformers 5.23; pip install -U transformers"
        )


def checkpoint_function(module: Any) -> Any:
    """Returns the function that checkpoints a module's layers, a partial of torch's (5.23); None if there is none."""
    return getattr(module, "_gradient_checkpointing_func", None)


def offloads_checkpoints(module: Any) -> bool:
    """True if a module's activation checkpointing keeps inputs in host memory: `offload` of transformers'
    `activation_checkpointing_enable` (5.23), or an equivalent function of the user."""
    function = checkpoint_function(module)
    while isinstance(function, functools.partial):
        function = function.func
    return torch.autograd.graph.save_on_cpu.__name__ in getattr(getattr(function, "__code__", None), "co_names", ())


def torch_init() -> AbstractContextManager[Any]:
    """Returns a context that restores torch's own init functions within transformers' `no_init_weights` (5.23): PEFT's
    VeRA uses their return values."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    functions: dict[str, Any] = TORCH_INIT_FUNCTIONS
    return mock.patch.multiple(torch.nn.init, **functions)
