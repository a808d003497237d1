"""Tunes this process's malloc and garbage collector.

By default glibc's malloc keeps freed blocks, so a step on the CPU holds more than its tensors, and Python's garbage
collector is slow when many objects are created.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import gc
import os
from collections.abc import Iterator

# malloc.h: parameters of mallopt(3). Setting either one switches off glibc's dynamic thresholds.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Blocks from 256 KiB are mapped and returned one by one. Trimming the heap at every free takes time and saves nothing.
_MMAP_BYTES = 256 * 1024
_TRIM_BYTES = 64 * 1024 * 1024
_DEFAULT_BYTES = 128 * 1024
# The maximum of glibc's dynamic thresholds, as in a process with default settings of malloc.
_KEPT_BYTES = 32 * 1024 * 1024

# Thresholds of Python's garbage collector: new objects per run on the youngest generation, then runs per older one.
_COLLECT_AFTER = (100_000, 50, 100)

# Numbers of `return_freed_memory` and `keep_freed_memory` calls in force: malloc's settings are global to the process,
# which may have several engines.
_users = _keeping = 0


@functools.cache
def _libc() -> ctypes.CDLL:
    # Cached, since `find_library` starts a process.
    return ctypes.CDLL(ctypes.util.find_library("c"))


def _mallopt(mmap_threshold: int, trim_threshold: int) -> bool:
    # malloc's environment variables are the user's own setting and take precedence; other libcs have no mallopt.
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        return False
    if (mallopt := getattr(_libc(), "mallopt", None)) is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_threshold)) and bool(mallopt(_M_TRIM_THRESHOLD, trim_threshold))


class _Info(ctypes.Structure):
    """The `struct mallinfo2` of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def kept_bytes() -> int:
    """Returns the freed bytes that malloc keeps; 0 if it does not report them (glibc does from 2.33)."""
    if (mallinfo := getattr(_libc(), "mallinfo2", None)) is None:
        return 0
    mallinfo.restype = _Info
    return int(mallinfo().fordblks)


def trim() -> None:
    """Return freed pages to the system now, including pages in the middle of the heap; no effect without glibc."""
    if (malloc_trim := getattr(_libc(), "malloc_trim", None)) is not None:
        malloc_trim(0)


def return_freed_memory() -> bool:
    """Return what malloc keeps now to the system, and later freed blocks from 256 KiB until `restore_malloc`.

    Returns:
        False if malloc cannot be configured.
    """
    global _users
    _users += 1
    if is_set := _settle():
        # A step that ran before, such as one of plain PyTorch, has left hundreds of MiB that would count as in use.
        trim()
    return is_set


def restore_malloc() -> None:
    """Undo one `return_freed_memory`; the last one sets both thresholds to glibc's documented, static defaults."""
    global _users
    _users = max(0, _users - 1)
    _settle()


def keep_freed_memory() -> None:
    """Keep freed blocks for reuse, if every caller of `return_freed_memory` has also called this.

    Each page that comes from the system again costs a page fault, in which the kernel fills it with zeros.
    """
    global _keeping
    _keeping += 1
    _settle()


def keep_no_more() -> None:
    """Undo one `keep_freed_memory` and return the kept memory; later blocks that fit into its heap space stay kept."""
    global _keeping
    _keeping = max(0, _keeping - 1)
    if _settle():
        trim()


def keeps_freed_memory() -> bool:
    """True if malloc keeps freed blocks for an engine; they count as resident, but hold no tensors of a step."""
    return 0 < _users <= _keeping


def _settle() -> bool:
    if keeps_freed_memory():
        return _mallopt(_KEPT_BYTES, 2 * _KEPT_BYTES)
    return _mallopt(_MMAP_BYTES, _TRIM_BYTES) if _users else _mallopt(_DEFAULT_BYTES, _DEFAULT_BYTES)


@contextlib.contextmanager
def fewer_collections() -> Iterator[None]:
    """Run Python's garbage collector less often within the block: imports and tracing create millions of objects and
    little garbage, and the collector takes a tenth to a fifth of their time."""
    before = gc.get_threshold()
    # A first threshold of 0 means that the user has disabled the collector.
    if before[0]:
        gc.set_threshold(*map(max, before, _COLLECT_AFTER))
    try:
        yield
    finally:
        gc.set_threshold(*before)
