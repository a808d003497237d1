"""Private names of torch: modules and their hooks, tensors, the running backward, the process group."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from torch.distributed import Store


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` once at the end of the running backward; call this from inside a tensor hook only.

    As in DDP and FSDP (torch 2.13): no public hook fires at the end of a whole backward.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def backward_pass() -> int:
    """Returns a unique id of the running backward; -1 if none runs (torch 2.13)."""
    number: int = torch._C._current_graph_task_id()
    return number


def is_in_function_transform() -> bool:
    """True within a transform of `torch.func` (`grad`, `vmap`, `jvp`), whose tensors have no storage that a compiled
    graph could read (torch 2.13)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def mode_without_compiler() -> str:
    """Returns the class name of an active `TorchDispatchMode` within which dynamo compiles nothing; empty if there is
    none (`torch/_dynamo/convert_frame.py`, torch 2.9 to 2.15)."""
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        # The second method is new in torch 2.11.
        if not mode.is_infra_mode() and not getattr(mode, "ignore_compile_internals", bool)():
            return type(mode).__name__.lstrip("_")
    return ""


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Returns the module's own parameters, without submodules, as a live dict (torch 2.13)."""
    return module._parameters


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the numbers that a tensor has in memory: an expanded dimension has one entry."""
    return tensor[places] if (places := _distinct(tensor)) else tensor


def write_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write former values into a tensor, also into an expanded one, into which torch does not write.

    Written through `.data`: a forward whose backward is pending may have saved the tensor's old values.
    """
    places = _distinct(tensor)
    (tensor.data[places] if places else tensor.data).copy_(values[places] if places else values)


def _distinct(tensor: torch.Tensor) -> tuple[slice, ...]:
    steps = tensor.stride() if tensor.layout is torch.strided else ()
    return tuple(slice(0, 1) if step == 0 else slice(None) for step in steps) if 0 in steps else ()


def next_hook_id() -> int:
    """Returns the id that the next registered hook of any kind will get; later hooks get higher ids (torch 2.13)."""
    return RemovableHandle.next_id


def hooks_around_forward(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Returns the module's forward pre-hooks and forward hooks by handle id, which increases with each registered
    hook: live dicts that may be changed in place (torch 2.13)."""
    return module._forward_pre_hooks, module._forward_hooks


def hooks_around_call(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """Returns the hooks of `hooks_around_forward`, backward pre-hooks and backward hooks (torch 2.13)."""
    return *hooks_around_forward(module), module._backward_pre_hooks, module._backward_hooks


def has_hook_since(hooks: Iterable[Mapping[int, Any]], first: int) -> bool:
    """True if one of these dicts has a hook with the id `first` or a later one, see `next_hook_id`."""
    return any(number >= first for of_kind in filter(None, hooks) for number in of_kind)


# The attribute in which `Module.compile` keeps the compiled call of a module (torch 2.13).
_COMPILED_CALL = "_compiled_call_impl"


def take_compiled_calls(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """Undo `Module.compile` on all modules; returns the compiled calls, for `give_compiled_calls`."""
    taken = {module: vars(module).get(_COMPILED_CALL) for module in model.modules()}
    for module in (compiled := {module: call for module, call in taken.items() if call is not None}):
        delattr(module, _COMPILED_CALL)
    return compiled


def give_compiled_calls(calls: Mapping[torch.nn.Module, Any]) -> None:
    """Restore compiled calls, except for modules on which `Module.compile` has run again."""
    for module, call in calls.items():
        vars(module).setdefault(_COMPILED_CALL, call)


def writes_to(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was written to in place, by autograd's version counter (torch 2.13)."""
    # Tensors of inference mode have no version counter, and are read-only outside of it.
    return 0 if tensor.is_inference() else tensor._version


def accumulation_hooks(parameter: torch.Tensor) -> bool:
    """True for a tensor with hooks of `register_post_accumulate_grad_hook` (torch 2.13)."""
    return bool(parameter._post_accumulate_grad_hooks)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run the step method of an optimizer's class, without step hooks and without patches of the instance
    (`Optimizer.profile_hook_step` marks the method it returns as hooked; torch 2.13)."""
    step: Callable[..., Any] = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)


@contextmanager
def clipping_watched(watch: Callable[[Sequence[torch.Tensor]], None]) -> Iterator[None]:
    """Returns a context in which torch's functions that clip gradients, by norm or by value, first call `watch` with
    the gradients that they have found (`torch/nn/utils/clip_grad.py`, torch 2.9 to 2.15)."""
    module: Any = torch.nn.utils.clip_grad
    norm_of, grouped_by = module._get_total_norm, module._group_tensors_by_device_and_dtype

    def total_norm(gradients: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        watch(gradients)
        norm: torch.Tensor = norm_of(gradients, *args, **kwargs)
        return norm

    def grouped(lists: Sequence[Sequence[torch.Tensor]], *args: Any, **kwargs: Any) -> dict[Any, Any]:
        # `clip_grad_value_` calls this alone, and fails if there are no gradients.
        watch(lists[0])
        groups: dict[Any, Any] = grouped_by(lists, *args, **kwargs) if lists[0] else {}
        return groups

    names = ("_get_total_norm", total_norm), ("_group_tensors_by_device_and_dtype", grouped)
    with _replaced((torch.nn.utils, "get_total_norm", total_norm), *((module, *each) for each in names)):
        yield


@contextmanager
def scaling_watched(watch: Callable[[int], None]) -> Iterator[None]:
    """Returns a context in which each backward of a loss that a `GradScaler` has scaled first calls `watch` with its
    `backward_pass` (`torch/amp/grad_scaler.py`, torch 2.9 to 2.15)."""
    kind: Any = torch.amp.GradScaler
    original = kind.scale

    def scale(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        for loss in tensors_in(scaled) if scaler.is_enabled() else ():
            if loss.requires_grad:
                loss.register_hook(lambda _: watch(backward_pass()))
        return scaled

    with _replaced((kind, "scale", scale)):
        yield


@contextmanager
def _replaced(*replacements: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of torch for all models; contexts of several models may end in any order, so a function that
    has been replaced again stays, and calls the original from then on."""
    originals = [getattr(owner, name) for owner, name, _ in replacements]
    is_active = True

    def while_active(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (ours if is_active else original)(*args, **kwargs)

        return call

    calls = [while_active(ours, original) for (*_, ours), original in zip(replacements, originals, strict=True)]
    for (owner, name, _), call in zip(replacements, calls, strict=True):
        setattr(owner, name, call)
    try:
        yield
    finally:
        is_active = False
        for (owner, name, _), call, original in zip(replacements, calls, originals, strict=True):
            if getattr(owner, name) is call:
                setattr(owner, name, original)


def world_size() -> int:
    """Returns the number of processes in torch's process group; 1 without one."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if has_group else 1


def of_all_ranks(value: Any) -> list[Any]:
    """Returns every rank's value, in rank order; every rank must call this. A single process, or one with the `fake`
    backend, gets its own value only."""
    if world_size() == 1 or torch.distributed.get_backend() == "fake":
        return [value]
    values = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def store_of_ranks() -> "Store | None":
    """Returns the key-value store of the process group; None for a single process (torch 2.13)."""
    if world_size() == 1:
        return None
    return importlib.import_module("torch.distributed.distributed_c10d")._get_default_store()


def extension_lock(name: str) -> Path:
    """Returns the lock file that exists while torch compiles an extension; other processes wait for it silently and
    without a timeout (torch 2.13, `_jit_compile` in `torch/utils/cpp_extension.py`).
    """
    return Path(importlib.import_module("torch.utils.cpp_extension")._get_build_directory(name, False), "lock")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields a tensor, or the tensors in nested mappings (such as transformers' ModelOutput), lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def class_forward(module: torch.nn.Module) -> Any:
    """Returns the forward of a module's class, undecorated by the descriptor of a TorchScript module's, which fails on
    the class (`_CachedForward` in `torch/jit/_script.py`, torch 2.13)."""
    return inspect.getattr_static(type(module), "forward", None)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the total bytes of tensors, each counted once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def current_autocast(device_type: str) -> torch.dtype | None:
    """Returns the dtype that autocast casts to now; None if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def modes_restored_on_error(device_type: str) -> Iterator[None]:
    """Returns a context that restores grad mode and autocast if the code within raises. Pieces of a compiled forward
    set both, and an error leaves the state of the piece that raised it (`grad_enabled_mutation` in
    `torch/_functorch/_aot_autograd`, 2.13)."""
    has_gradients, is_on = torch.is_grad_enabled(), torch.is_autocast_enabled(device_type)
    dtype, depth = torch.get_autocast_dtype(device_type), autocast_depth()
    try:
        yield
    except BaseException:
        torch.set_grad_enabled(has_gradients)
        torch.set_autocast_enabled(device_type, is_on)
        torch.set_autocast_dtype(device_type, dtype)
        set_autocast_depth(depth)
        raise


def autocast_depth() -> int:
    """Returns the number of nested autocast contexts; the outermost one frees its casts of parameters on exit."""
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth


def set_autocast_depth(depth: int) -> None:
    """Make the code count as running in this many nested autocast contexts."""
    for _ in range(autocast_depth(), depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, autocast_depth()):
        torch.autocast_decrement_nesting()


def without_modes() -> AbstractContextManager[Any]:
    """Returns a context that disables torch's dispatch modes: new tensors are real (or on meta), and operators run
    directly (`torch/utils/_python_dispatch.py`, 2.13)."""
    mode: AbstractContextManager[Any] = _python_dispatch._disable_current_modes()
    return mode
