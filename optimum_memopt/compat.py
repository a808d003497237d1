"""Private names of torch and transformers that the package needs beside those of its engines, and versions of what is
installed."""

import contextlib
import functools
import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn.modules import module as torch_module
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

from optimum_memopt.errors import MemOptError

if TYPE_CHECKING:
    from torch.distributed import Store


# Hooks of a module, or of all of them, that are given outputs or the gradients of outputs.
_OUTPUT_HOOKS = ("forward_hooks", "backward_hooks", "backward_pre_hooks")


# Trainer's fields; the older one warns since transformers 5.23, which has both.
CHECKPOINTING_FIELDS = ("activation_checkpointing", "gradient_checkpointing")


def installed_version(distributions: Sequence[str]) -> tuple[str, str] | None:
    """Name and version of the first of these distributions that is installed, without an import of it."""
    for distribution in distributions:
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@contextlib.contextmanager
def without_kernel_warning() -> Iterator[None]:
    """Without the warning of bitsandbytes, which PEFT and Trainer import, about a kernel for CPUs that it did not load
    (0.50): what is predicted runs none.

    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/backends/cpu/ops.py
    """
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def passes(record: logging.LogRecord) -> bool:
        return "gemm_4bit_forward" not in record.msg

    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def software() -> dict[str, str]:
    """The versions of this package, torch and transformers, by their distributions."""
    versions = (installed_version((distribution,)) for distribution in ("optimum-memopt", "torch", "transformers"))
    return dict(filter(None, versions))


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` once when the backward pass that runs now is done; from inside a tensor hook only.

    Seen in torch 2.13, used by DDP and FSDP: no public hook fires at the end of a whole backward pass.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def backward_pass() -> int:
    """A number of the backward that runs now, no other's; -1: none runs (torch 2.13)."""
    number: int = torch._C._current_graph_task_id()
    return number


def forward_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """The module's forward hooks by the ids in their handles, which grow with each hook that is registered; to be
    changed in place (torch 2.13)."""
    return module._forward_hooks


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's parameters without those of modules in it, which change with those (torch 2.13)."""
    return module._parameters


def next_hook_id() -> int:
    """The id of the hook that is registered next, of any kind; later ones have higher ids (torch 2.13)."""
    return RemovableHandle.next_id


def hooks_around_forward(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The module's hooks before and after its forward, which change with those (torch 2.13)."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_around_call(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The same, and its hooks before and after its backward (torch 2.13)."""
    return *hooks_around_forward(module), module._backward_pre_hooks, module._backward_hooks


# The attribute in which `Module.compile` keeps the compiled call of a module (torch 2.13).
_COMPILED_CALL = "_compiled_call_impl"


def take_compiled_calls(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """Undo `Module.compile` on all modules; returns their compiled calls, for `give_compiled_calls`."""
    taken = {module: vars(module).get(_COMPILED_CALL) for module in model.modules()}
    for module in (compiled := {module: call for module, call in taken.items() if call is not None}):
        delattr(module, _COMPILED_CALL)
    return compiled


def give_compiled_calls(calls: Mapping[torch.nn.Module, Any]) -> None:
    """Restore compiled calls, except where `Module.compile` has run again."""
    for module, call in calls.items():
        vars(module).setdefault(_COMPILED_CALL, call)


# The method from which a Trainer takes its training sampler, given a data set (transformers 5.23).
TRAIN_SAMPLER = "_get_train_sampler"


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


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place, by autograd's own counter (torch 2.13)."""
    # Those of inference mode are counted by nobody, and are read-only outside of it.
    return 0 if tensor.is_inference() else tensor._version


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """That of all ranks' parts together, of which DeepSpeed's ZeRO 3 leaves none in the tensor (0.19, `zero.Init`)."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def is_sharded_by_deepspeed(model: torch.nn.Module) -> bool:
    """True for a model whose parameters ZeRO 3 has sharded (0.19)."""
    return any(hasattr(parameter, "ds_shape") for parameter in model.parameters())


def accumulation_hooks(parameter: torch.Tensor) -> bool:
    """True for a tensor with hooks of `register_post_accumulate_grad_hook` (torch 2.13)."""
    return bool(parameter._post_accumulate_grad_hooks)


def fsdp_version(args: Any) -> int | None:
    """The version of FSDP that a Trainer's arguments, or accelerate's launcher and config file, ask for; None: none.

    accelerate's launcher asks in the environment, without the Trainer's argument (1.15, `utils/dataclasses.py`).
    """
    if args.fsdp:
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return None
    return int(os.environ.get("FSDP_VERSION", "1"))


def parallelisms(args: Any) -> tuple[str, ...]:
    """The kinds of parallelism, of tensor, context and sequence, that a Trainer's arguments or accelerate's launcher
    in the environment ask for (accelerate 1.15, `parallelism_config.py`)."""
    config = getattr(args, "parallelism_config", None)
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true":
        config = importlib.import_module("accelerate").parallelism_config.ParallelismConfig()
    kinds = {"tensor": "tp", "context": "cp", "sequence": "sp"}
    return tuple(kind for kind, short in kinds.items() if getattr(config, f"{short}_enabled", False))


def leave_out_fsdp_checkpointing(trainer: Any) -> Callable[[], None] | None:
    """Have accelerate wrap no layer for activation checkpointing, as `activation_checkpointing` of an FSDP config asks
    for (1.15).

    Returns:
        What undoes it; None where no layer was to be wrapped.
    """
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or not plugin.activation_checkpointing:
        return None
    plugin.activation_checkpointing = False
    return lambda: setattr(plugin, "activation_checkpointing", True)


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


def final_norm(model: torch.nn.Module) -> torch.nn.Module | None:
    """The norm that accelerate shards together with the head (1.15); None: it finds none."""
    find = getattr(importlib.import_module("accelerate.utils.fsdp_utils"), "_find_final_norm", None)
    norm: torch.nn.Module | None = None if find is None else find(model)
    return norm


def is_mask(name: str) -> bool:
    """True for the name of an input of transformers' models that marks the tokens that are no padding."""
    return name.endswith("attention_mask")


def world_size() -> int:
    """Processes in torch's process group; 1 without one."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if has_group else 1


def of_all_ranks(value: Any) -> list[Any]:
    """This value of every rank, in their order; every rank must call this. A process alone, or one that stands for a
    rank of several that are not there, has its own."""
    if world_size() == 1 or torch.distributed.get_backend() == "fake":
        return [value]
    values = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def store_of_ranks() -> "Store | None":
    """The key-value store that the process group was made with, None for a process alone (torch 2.13)."""
    if world_size() == 1:
        return None
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()


def extension_lock(name: str) -> Path:
    """The file that is there while torch compiles an extension, for which others wait without a word and without end
    (torch 2.13, `_jit_compile` in `torch/utils/cpp_extension.py`).
    """
    return Path(importlib.import_module("torch.utils.cpp_extension")._get_build_directory(name, False), "lock")


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


def offloads_checkpoints(module: Any) -> bool:
    """True for a module whose activation checkpointing holds its inputs in host memory: `offload` of transformers'
    `activation_checkpointing_enable` (5.23), or a function of the user's that does as much."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    while isinstance(function, functools.partial):
        function = function.func
    return torch.autograd.graph.save_on_cpu.__name__ in getattr(getattr(function, "__code__", None), "co_names", ())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those in a mapping (transformers' ModelOutput is one), list or tuple, nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def in_float32(outputs: Any) -> Any:
    """A model's outputs as accelerate returns them under autocast (`ConvertOutputsToFp32`, 1.15)."""
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(outputs)


def without_modes() -> AbstractContextManager[Any]:
    """Within it tensors are real, or on meta, and operators run as they are called (`torch/utils/_python_dispatch.py`,
    2.13)."""
    mode: AbstractContextManager[Any] = _python_dispatch._disable_current_modes()
    return mode


def torch_init() -> AbstractContextManager[Any]:
    """torch's own functions for initial values, also within transformers' `no_init_weights` (5.23): PEFT's VeRA uses
    what they return."""
    from transformers.initialization import TORCH_INIT_FUNCTIONS

    functions: dict[str, Any] = TORCH_INIT_FUNCTIONS
    return mock.patch.multiple(torch.nn.init, **functions)
