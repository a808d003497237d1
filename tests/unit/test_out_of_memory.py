import pytest
import torch

from optimum_memopt.errors import Shortage, is_out_of_memory, shortage

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 3.25 MiB is "
    "free. Including non-PyTorch memory, this process has 79.14 GiB memory in use. Of the allocated memory 77.50 GiB "
    "is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1048576000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 8.00 GiB for an array"),
        torch.OutOfMemoryError(CUDA),
        RuntimeError(CPU),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_memory_ran_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()],
)
def test_another_error(error):
    assert not is_out_of_memory(error)


def test_the_allocators_own_error_is_recognised():
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert shortage(caught.value) == Shortage(requested=2**60, allocated=None)


def test_amounts():
    assert shortage(RuntimeError(CUDA)) == Shortage(20 * 2**20, int(77.5 * 2**30))
    assert shortage(RuntimeError(CPU)) == Shortage(1048576000000, None)
    assert shortage(MemoryError()) == Shortage(None, None)
