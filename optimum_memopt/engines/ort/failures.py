"""What ORT's errors say, in one line, and a lack of memory in torch's words."""

import contextlib
import re
from collections.abc import Iterator

import torch

# A failed check in ORT's C++ code: path, line, signature, condition or status, and in most cases a reason.
_FAILED_CHECK = re.compile(
    r"/onnxruntime_src/\S*?(?P<place>[^/\s]+:\d+) .*\)>? (?:const )?"
    r"(?P<condition>\S.*was false\.|\[ONNXRuntimeError\][^:]*:[^:]*:[^:]*:) ?(?P<reason>.*)"
)


# What the CPU and CUDA allocators of ORT and torch say.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "Failed to allocate memory")


@contextlib.contextmanager
def out_of_memory_as_torch_says_it() -> Iterator[None]:
    """ORT reports a lack of memory as any failed node. Trainer's auto_find_batch_size, and whoever else tries again
    with a smaller batch, looks for torch's error and for these words (accelerate, `should_reduce_batch_size`)."""
    try:
        yield
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
        raise torch.OutOfMemoryError(f"ONNX Runtime is out of memory. {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The last telling line of an error, since ORT puts whole tracebacks and C++ signatures into its messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if failed := _FAILED_CHECK.search(lines[-1]):
        lines[-1] = f"{failed['place']}: {failed['reason'] or failed['condition']}"
    return f"{type(error).__name__}: {lines[-1]}"
