"""Private names of torch: modules and their hooks, tensors, the backward that runs, the process group."""

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed import Store


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` once when the backward pass that runs now is done; from inside a tensor hook only.

    Seen in torch 2.13, used by DDP and FSDP: no public hook fires at the end of a whole backward pass.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def backward_pass() -> int:
    """A number of the backward that runs now, no other's; -1: none runs (torch 2.13)."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_in_function_transform() -> bool:
    """True within a transform of `torch.func` (`grad`, `vmap`, `jvp`), of whose tensors none has a storage that a
    compiled graph could read (torch 2.13)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


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


def has_hook_since(hooks: Iterable[Mapping[int, Any]], first: int) -> bool:
    """Returns True if one of these dicts has a hook with the id `first` or a later one, see `next_hook_id`."""
    return any(number >= first for of_kind in filter(None, hooks) for number in of_kind)


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


def writes_to(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place, by autograd's own counter (torch 2.13)."""
    # Those of inference mode are counted by nobody, and are read-only outside of it.
    return 0 if tensor.is_inference() else tensor._version


def accumulation_hooks(parameter: torch.Tensor) -> bool:
    """True for a tensor with hooks of `register_post_accumulate_grad_hook` (torch 2.13)."""
    return bool(parameter._post_accumulate_grad_hooks)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """A step by the method of an optimizer's class, without the hooks around a step, and without what was put on the
    object (`Optimizer.profile_hook_step`, which marks what it returns as hooked; torch 2.13)."""
    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


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


def current_autocast(device_type: str) -> torch.dtype | None:
    """Returns the dtype that autocast casts to now; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def modes_restored_on_error(device_type: str) -> Iterator[None]:
    """Restores grad mode and autocast if the code within raises. The pieces of a compiled forward set both, and leave
    those of the piece that stopped (`grad_enabled_mutation` in `torch/_functorch/_aot_autograd`, 2.13)."""
    has_gradients, is_on = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    dtype, depth = torch.get_autocast_dtype(device_type), _autocast_depth()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(has_gradients)
        torch.set_autocast_enabled(device_type, is_on)
        torch.set_autocast_dtype(device_type, dtype)
        for _ in range(_autocast_depth(), depth):
            torch.autocast_increment_nesting()
        for _ in range(depth, _autocast_depth()):
            torch.autocast_decrement_nesting()
        raise


def _autocast_depth() -> int:
    """Returns how many contexts of autocast the code runs in."""
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth


def without_modes() -> AbstractContextManager[Any]:
    """Within it tensors are real, or on meta, and operators run as they are called (`torch/utils/_python_dispatch.py`,
    2.13)."""
    mode: AbstractContextManager[Any] = _python_dispatch._disable_current_modes()
    return mode
