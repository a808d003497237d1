"""The private names of torch that tell where its compilers have failed, and what of."""

import traceback

from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

from optimum_memopt.errors import line_of

# `CompiledFunction.backward`, for which torch traces and compiles the backward too, where the forward has not.
_BACKWARD = ("torch/_functorch/_aot_autograd/runtime_wrappers.py", "backward")


def failure_of_compiler(error: BaseException) -> str:
    """Where torch gave up by a fault of its own, and what it met (`torch/_dynamo/exc.py`, 2.13); empty for any other
    error. What it knows that it cannot trace breaks the graph instead."""
    if isinstance(error, InternalTorchDynamoError):
        # Its text has the kind of error that it met.
        return f"torch cannot trace this model ({str(error).strip().splitlines()[0]})"
    return f"torch cannot compile this model ({line_of(error)})" if isinstance(error, BackendCompilerFailed) else ""


def is_of_compiled_backward(error: BaseException) -> bool:
    """Whether an error was raised while a compiled backward ran."""
    file, function = _BACKWARD
    return any(
        frame.f_code.co_name == function and frame.f_code.co_filename.replace("\\", "/").endswith(file)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
