"""State of the process that trains: libraries of CUDA, autocast, random generators, backwards."""

import contextlib
import traceback
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch.amp import autocast_mode

from optimum_memopt.errors import line_of


def start_libraries(device: torch.device) -> None:
    """Have cuBLAS allocate its workspaces on a CUDA device now, so that they count among what the process holds.

    torch gives it one a thread and stream (`aten/src/ATen/cuda/CublasHandlePool.cpp`; 32 MiB each on an H100): here
    for the thread that runs forwards, and for autograd's thread of the device.

    Args:
        device: nothing is done for one that is no CUDA device of this machine.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        weight = torch.ones(8, 8, device=device, requires_grad=True)
        bias = torch.ones(8, device=device)
        torch.nn.functional.linear(weight, weight, bias).sum().backward()


def generator_state(device: torch.device) -> torch.Tensor:
    """A copy of the state of a device's default generator: bytes, on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


# `CompiledFunction.backward`, for which torch traces and compiles the backward too, where the forward has not.
_COMPILED = "CompiledFunctionBackward"
_BACKWARD = ("torch/_functorch/_aot_autograd/runtime_wrappers.py", "backward")


def autocast_dtype(node: fx.Node, device_type: str) -> torch.dtype | None:
    """The dtype that autocast gives an operator of a graph that dynamo has traced, None where it is off.

    Dynamo calls its backend in the state that the traced function was called in; what the function itself changes is
    in the graph (`torch/_dynamo/variables/ctx_manager.py`, `AutocastModeVariable`).
    """
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    inside: dict[fx.Node, torch.dtype | None] = {}
    for earlier in node.graph.nodes:
        if earlier is node:
            break
        if earlier.target is autocast_mode._enter_autocast and earlier.args[0] == device_type:
            _, given, is_enabled, *_ = earlier.args
            inside[earlier] = (given or torch.get_autocast_dtype(device_type)) if is_enabled else None
        elif earlier.target is autocast_mode._exit_autocast:
            inside.pop(earlier.args[0], None)
    return list(inside.values())[-1] if inside else dtype


def backward_runs_once() -> bool:
    """Inside a backward: whether autograd frees what it has saved afterwards (no `retain_graph=True`).

    AOTAutograd asks the same before it overwrites saved activations (`_aot_autograd/runtime_wrappers.py`).
    """
    is_backward = torch._C._current_graph_task_id() != -1
    return is_backward and not torch._C._autograd._get_current_graph_task_keep_graph()


def failure_of_compiler(error: BaseException) -> str:
    """Where torch gave up by a fault of its own, and what it met (`torch/_dynamo/exc.py`, 2.13); empty for any other
    error. What it knows that it cannot trace breaks the graph instead."""
    if isinstance(error, InternalTorchDynamoError):
        # Its text has the kind of error that it met.
        return f"torch cannot trace this model ({str(error).strip().splitlines()[0]})"
    return f"torch cannot compile this model ({line_of(error)})" if isinstance(error, BackendCompilerFailed) else ""


def is_of_compiled_backward(error: BaseException) -> bool:
    """True for an error that was raised while a compiled backward ran."""
    file, function = _BACKWARD
    return any(
        frame.f_code.co_name == function and frame.f_code.co_filename.replace("\\", "/").endswith(file)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def order_of(results: Iterable[object]) -> int:
    """The place in the order of autograd's operators of the one that returned these; -1: none that it knows."""
    nodes = (result.grad_fn for result in results if isinstance(result, torch.Tensor))
    return max((node._sequence_nr() for node in nodes if node is not None), default=-1)


def saved_by_operators(outputs: Iterable[object]) -> list[tuple[int, torch.Tensor]]:
    """What autograd has saved for operators that are in no compiled graph, with the place of each in their order.

    Args:
        outputs: of a forward; what they do not depend on is not found.
    """
    found: list[tuple[int, torch.Tensor]] = []
    todo: list[Any] = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if type(node).__name__ != _COMPILED:
            found += [(node._sequence_nr(), tensor) for tensor in _saved_tensors(node)]
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return found


def _saved_tensors(node: Any) -> list[torch.Tensor]:
    """Of a node of autograd: what a `torch.autograd.Function` has saved, or one of torch's own (`_saved_self`)."""
    found: list[Any] = []
    for name in ("saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))):
        # One that was written to since.
        with contextlib.suppress(AttributeError, RuntimeError):
            value = getattr(node, name)
            found += value if isinstance(value, tuple | list) else [value]
    return [value for value in found if isinstance(value, torch.Tensor)]
