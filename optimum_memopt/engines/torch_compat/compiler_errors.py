"""Errors raised while torch traces, compiles, and runs compiled graphs.

Checked in torch 2.13.0, and present since 2.9.
"""

import traceback

from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException

from optimum_memopt.engines.torch_compat.recompiles import place_text
from optimum_memopt.errors import MemOptError, is_out_of_memory, line_of, with_causes

# The file and name of `CompiledFunction.backward`, in which torch also compiles a backward that is not compiled yet.
_BACKWARD = ("torch/_functorch/_aot_autograd/runtime_wrappers.py", "backward")


class DraftFailedError(MemOptError):
    """Raised when a graph fails that runs operator by operator, only to reach the graphs after it."""


def place_of(error: BaseException) -> str:
    """Returns the user's line that raised an error, as `, at model.py:28, in forward`; empty if none is known."""
    for each in reversed([*with_causes(error)]):
        # Code that dynamo traces does not run, so it is not in the traceback.
        stack = getattr(each, "real_stack", None) or traceback.extract_tb(each.__traceback__)
        if place := place_text(stack):
            return place
    return ""


def line_with_place(error: BaseException) -> str:
    """Returns `line_of` of an error, with the user's line."""
    return f"{line_of(error)}{place_of(error)}"


def failure_of_compiler(error: BaseException) -> str:
    """Returns a line with an internal error of torch and its place (`torch/_dynamo/exc.py`, 2.13); empty for any other
    error. Code that torch knows it cannot trace breaks the graph instead."""
    if isinstance(error, InternalTorchDynamoError):
        # Its text includes the class of the original error.
        return f"torch cannot trace this model ({str(error).strip().splitlines()[0]}{place_of(error)})"
    if isinstance(error, BackendCompilerFailed):
        return f"torch cannot compile this model ({line_with_place(error)})"
    return ""


def is_of_trace(error: BaseException) -> bool:
    """True for an error that torch raises while it traces or compiles (`torch/_dynamo/exc.py`, 2.13)."""
    return isinstance(error, TorchDynamoException)


def is_of_compiled_backward(error: BaseException) -> bool:
    """True for an error that was raised while a compiled backward ran."""
    file, function = _BACKWARD
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_name == function and code.co_filename.replace("\\", "/").endswith(file) for code in codes)


def own_error(error: BaseException) -> BaseException | None:
    """Returns the unwrapped error if it is not a compiler failure: a MemOptError, out of memory, or an interrupt."""
    inner = getattr(error, "inner_exception", None) or error
    is_own = not isinstance(inner, Exception) or isinstance(inner, MemOptError) or is_out_of_memory(inner)
    return inner if is_own else None
