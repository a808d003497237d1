"""Errors that are raised where torch traces, compiles, and runs what it has compiled.

Seen in torch 2.13.0, and there since 2.9.
"""

import traceback

from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException

from optimum_memopt.engines.compile.torch_compat.recompiles import place_text
from optimum_memopt.errors import MemOptError, is_out_of_memory, line_of, with_causes

# `CompiledFunction.backward`, for which torch traces and compiles the backward too, where the forward has not.
_BACKWARD = ("torch/_functorch/_aot_autograd/runtime_wrappers.py", "backward")


class DraftFailedError(MemOptError):
    """A graph that runs operator by operator, to show the graphs behind it, has failed."""


def place_of(error: BaseException) -> str:
    """The user's line that an error was raised at, as `, at model.py:28, in forward`; empty where none is known."""
    for each in reversed([*with_causes(error)]):
        # Code that dynamo traces does not run, and is in no traceback.
        stack = getattr(each, "real_stack", None) or traceback.extract_tb(each.__traceback__)
        if place := place_text(stack):
            return place
    return ""


def line_with_place(error: BaseException) -> str:
    """See `line_of`, with the user's line."""
    return f"{line_of(error)}{place_of(error)}"


def failure_of_compiler(error: BaseException) -> str:
    """The place where torch gave up by a fault of its own, and its error (`torch/_dynamo/exc.py`, 2.13); empty for any
    other error. What it knows that it cannot trace breaks the graph instead."""
    if isinstance(error, InternalTorchDynamoError):
        # Its text has the kind of error that it met.
        return f"torch cannot trace this model ({str(error).strip().splitlines()[0]}{place_of(error)})"
    if isinstance(error, BackendCompilerFailed):
        return f"torch cannot compile this model ({line_with_place(error)})"
    return ""


def is_of_trace(error: BaseException) -> bool:
    """True for an error that torch raises where it traces and compiles (`torch/_dynamo/exc.py`, 2.13)."""
    return isinstance(error, TorchDynamoException)


def is_of_compiled_backward(error: BaseException) -> bool:
    """True for an error that was raised while a compiled backward ran."""
    file, function = _BACKWARD
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_name == function and code.co_filename.replace("\\", "/").endswith(file) for code in codes)


def own_error(error: BaseException) -> BaseException | None:
    """The error itself, unwrapped, where it is no fault of a compiler's: a refusal, a lack of memory, an interrupt."""
    inner = getattr(error, "inner_exception", None) or error
    is_own = not isinstance(inner, Exception) or isinstance(inner, MemOptError) or is_out_of_memory(inner)
    return inner if is_own else None
