"""glibc's malloc, told to give freed blocks back: else a step on the CPU holds more than its tensors need."""

import ctypes
import ctypes.util
import os

# malloc.h: parameters of mallopt(3). Setting either ends glibc's own adjusting of both.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# Blocks from 256 KiB on are handed back one by one; trimming the rest at every free saves nothing more, for time.
_MMAP_BYTES = 256 * 1024
_TRIM_BYTES = 64 * 1024 * 1024
_DEFAULT_BYTES = 128 * 1024

_asked = 0  # by engines that are attached; malloc is one for the whole process


def _mallopt(mmap_threshold: int, trim_threshold: int) -> bool:
    # A user who tuned malloc by its environment variables knows better; other systems' libc has no mallopt.
    if {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mmap_threshold)) and bool(mallopt(_M_TRIM_THRESHOLD, trim_threshold))


def give_back_freed_memory() -> bool:
    """Until `restore` blocks from 256 KiB on go back to the system when freed; False where malloc cannot be told."""
    global _asked
    _asked += 1
    return _mallopt(_MMAP_BYTES, _TRIM_BYTES)


def restore() -> None:
    """Back to glibc's documented defaults of both thresholds (their automatic growth stays off), once for each call of
    `give_back_freed_memory`: the last one does it."""
    global _asked
    _asked = max(0, _asked - 1)
    if _asked == 0:
        _mallopt(_DEFAULT_BYTES, _DEFAULT_BYTES)
