"""CPython's data stack. Seen in CPython 3.10 to 3.14."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Pointers that the frame of `with_room` takes. CPython then allocates a chunk of 16,384 pointers, and leaves the rest
# to the frames above it; the frame of inductor's code for a layer takes about 200, for a whole model 1,000 or more.
_FRAME = 7500


def with_room(function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns the result of a function that runs many short functions, such as the launches of kernels.

    CPython keeps frames in chunks of 16 KiB. Where a caller's frame ends close to the end of a chunk, each call from
    it maps a new chunk and unmaps it again (https://github.com/python/cpython/issues/142183; mended in 2026 in 3.13
    and later). A forward of a RoBERTa of 12 layers took 3.1 ms of host time instead of 1.4, at one depth of the stack
    in twenty. This frame is too large for the rest of any chunk, so it begins a new one with room for the frames above
    it.
    """
    return function(*args, **(kwargs or {}))


with_room.__code__ = with_room.__code__.replace(co_stacksize=_FRAME)
