"""Shortens ORT's errors to one line and raises torch's error when memory runs out."""

import contextlib
import re
from collections.abc import Iterator

import torch

# A failed check in ORT's C++ code: path, line, signature, condition or status, and mostly a reason.
_FAILED_CHECK = re.compile(
    r"/onnxruntime_src/\S*?(?P<place>[^/\s]+:\d+) .*\)>? (?:const )?"
    r"(?P<condition>\S.*was false\.|\[ONNXRuntimeError\][^:]*:[^:]*:[^:]*:) ?(?P<reason>.*)"
)
# What the CPU and CUDA allocators of ORT and torch say.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "Failed to allocate memory")


@contextlib.contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Raise torch.OutOfMemoryError where ORT reports out of memory as a failed node.

    Code that retries with a smaller batch, such as Trainer's auto_find_batch_size, looks for torch's error and for
    these words (accelerate, `should_reduce_batch_size`).
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise torch.OutOfMemoryError(f"ONNX Runtime is out of memory. {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The last meaningful line of an error; ORT's messages contain tracebacks and C++ signatures."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if failed := _FAILED_CHECK.search(lines[-1]):
        lines[-1] = f"{failed['place']}: {failed['reason'] or failed['condition']}"
    return f"{type(error).__name__}: {lines[-1]}"
