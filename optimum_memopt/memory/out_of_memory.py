"""Which errors mean that memory ran out, and what they say of it. Pure."""

import re
from dataclasses import dataclass

# torch's allocators (`c10/core/impl/alloc_cpu.cpp`, `c10/cuda/CUDACachingAllocator.cpp`, 2.13), and C++.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "failed to allocate memory")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB)"
_REQUESTED = re.compile(rf"tried to allocate {_AMOUNT}", re.IGNORECASE)
_ALLOCATED = re.compile(rf"{_AMOUNT} is allocated by PyTorch")


@dataclass(frozen=True)
class Shortage:
    """What an error says.

    Attributes:
        requested: bytes of the allocation that failed; None: it does not say.
        allocated: bytes that torch's allocator held at that moment; None: it does not say.
    """

    requested: int | None
    allocated: int | None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whichever device."""
    if isinstance(error, MemoryError):
        return True
    # torch.OutOfMemoryError is one; what a compiler or a launcher has wrapped is not.
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def shortage(error: BaseException) -> Shortage:
    """The amounts in an error's message; CUDA's are rounded to hundredths of their unit."""
    return Shortage(_amount(_REQUESTED, str(error)), _amount(_ALLOCATED, str(error)))


def _amount(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])
