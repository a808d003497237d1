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

# Hooks of a module, or of all of them, that are given outputs or the gradients of outputs.
_OUTPUT_HOOKS = ("forward_hooks", "backward_hooks", "backward_pre_hooks")

# Trainer's fields; the older one warns since transformers 5.23, which has both.
CHECKPOINTING_FIELDS = ("activation_checkpointing", "gradient_checkpointing")

# The method from which a Trainer takes its training sampler, given a data set (transformers 5.23).
TRAIN_SAMPLER = "_get_train_sampler"

# The method that returns the norm of a step's gradients where none is clipped, given the model (transformers 5.12 to
# 5.24; older ones log no norm then).
GRADIENT_NORM = "_get_grad_norm"


def train_batch_size(trainer: Any) -> int:
    """Rows of a batch of a Trainer's data loader, as `auto_find_batch_size` has left them."""
    return trainer._train_batch_size


def reread_batch_size(trainer: Any) -> None:
    """Have a Trainer's data loader take the rows of its arguments (transformers 5.23).

    Gradient accumulation is read from the arguments in `train()`: Trainer's own accelerate accumulates nothing
    (`create_accelerator_and_postprocess`).
    """
    trainer._train_batch_size = trainer.args.train_batch_size


def collator(trainer: Any, kind: str) -> Callable[[list[Any]], Any]:
    """The collator of rows for `training` or `evaluation`, which lose the columns that the model does not take
    (transformers 5.23)."""
    return trainer._get_collator_with_removed_columns(trainer.data_collator, description=kind)


def prepared_inputs(trainer: Any, batch: Any) -> Any:
    """A batch as the Trainer gives it to its model (transformers 5.23)."""
    return trainer._prepare_inputs(batch)


def attention_implementation(config: Any) -> str | None:
    """transformers' name of the attention that a model with this config runs; None: the config has none."""
    return getattr(config, "_attn_implementation", None)


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def layer_classes(model: torch.nn.Module) -> frozenset[str]:
    """Names of the classes of layers that accelerate shards by themselves, where nobody names others; empty: none is
    known (transformers 5.23)."""
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def embeddings(model: torch.nn.Module, kind: str) -> torch.nn.Module | None:
    """transformers' input or output embeddings of a model; None: it has none, or is none of transformers'.

    Args:
        kind: `input` or `output`.
    """
    try:
        module: torch.nn.Module | None = getattr(model, f"get_{kind}_embeddings", lambda: None)()
    except NotImplementedError:
        # A model whose embeddings transformers does not find by their usual names.
        return None
    return module


def is_mask(name: str) -> bool:
    """True for the name of an input of transformers' models that marks the tokens that are no padding."""
    return name.endswith("attention_mask")


# Code between `Trainer.compute_loss` and the model's forward that returns the outputs and reads no values of them:
# wrappers of modules, autocast, context managers used as decorators.
_PASSES_THROUGH = frozenset({"optimum_memopt", "torch", "accelerate", "deepspeed", "contextlib"})

# Their hooks look at memory or time, or wait for the gradient of whatever the loss is made of (FSDP2, DeepSpeed).
_HOOKS_THAT_ADD_NOTHING = frozenset({"optimum_memopt", "deepspeed", "torch"})


def outputs_read_by() -> str:
    """Who may read more of the model's outputs than the loss; empty when nobody does. Costs 10 microseconds.

    Nobody does where the code that runs now was called by stock `Trainer.compute_loss`, which returns the model's own
    loss and nothing else, and no hook on the model or on a wrapper around it sees the other outputs.
    """
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and _package(_module(caller)) in _PASSES_THROUGH:
        caller = caller.f_back
    if caller is None:
        return "the training loop"
    if caller.f_code.co_name != "compute_loss" or _module(caller) != "transformers.trainer":
        # The qualified name is there from Python 3.11 on.
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
    """Those of the model, its wrappers (DDP and DeepSpeed name what they wrap `module`), all modules (torch 2.13)."""
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
    """Trainer's flag for activation checkpointing, which a script's parser knows."""
    from transformers import TrainingArguments

    return next(f"--{name}" for name in CHECKPOINTING_FIELDS if name in TrainingArguments.__dataclass_fields__)


def checkpoint_layers(model: Any, every: int) -> None:
    """Trainer's activation checkpointing of every nth layer.

    Raises:
        MemOptError: the model has none, or this transformers can only checkpoint all layers.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise MemOptError(f"{type(model).__name__} does not support activation checkpointing")
    # transformers 5.23 has both, and warns of the older one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    elif every == 1:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        raise MemOptError(
            f"checkpointing of every {every} layers needs transformers 5.23; pip install -U transformers"
        )


def checkpoint_function(module: Any) -> Any:
    """The function that checkpoints a module's layers, a partial of torch's (5.23); None without one."""
    return getattr(module, "_gradient_checkpointing_func", None)


def offloads_checkpoints(module: Any) -> bool:
    """True for a module whose activation checkpointing holds its inputs in host memory: `offload` of transformers'
    `activation_checkpointing_enable` (5.23), or a function of the user's that does as much."""
    function = checkpoint_function(module)
    while isinstance(function, functools.partial):
        function = function.func
    return torch.autograd.graph.save_on_cpu.__name__ in getattr(getattr(function, "__code__", None), "co_names", ())


def torch_init() -> AbstractContextManager[Any]:
    """torch's own functions for initial values, also within transformers' `no_init_weights` (5.23): PEFT's VeRA uses
    what they return."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    functions: dict[str, Any] = TORCH_INIT_FUNCTIONS
    return mock.patch.multiple(torch.nn.init, **functions)
