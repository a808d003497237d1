"""The private names of torch and Triton that decide which kernels run, whether they are right, and what they hold."""

import functools
import inspect
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Multiprocessors:
    """What decides how a kernel is split.

    Attributes:
        count: of the device.
        threads: that are resident on each.
    """

    count: int
    threads: int


def multiprocessors_of(device: torch.device) -> Multiprocessors | None:
    """Those of a CUDA device of this machine; None for another device, and for one that only fake tensors have."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    return Multiprocessors(found.multi_processor_count, found.max_threads_per_multi_processor)


def inductor_patches() -> dict[str, Any]:
    """inductor's switches while it compiles, for kernels that this release gets wrong.

    `triton.mix_order_reduction` (on by default since 2.10) computes reductions over rows and over columns in one
    kernel, and reduces its workspace afterwards. Where that result is a slice of a larger tensor the slice is never
    written: gradients are wrong without an error (https://github.com/pytorch/pytorch/issues/193061). The fix writes
    through the slice with `copy_` (pytorch PR 193103).
    """
    return {"triton.mix_order_reduction": False} if _drops_slices() else {}


@functools.cache
def _drops_slices() -> bool:
    from torch._inductor import config
    from torch._inductor.codegen import simd

    if not hasattr(config.triton, "mix_order_reduction"):
        return False
    _, is_there, rest = inspect.getsource(simd).partition("{buffer_name} = {ws_name}[")
    return bool(is_there) and ".copy_(" not in rest[:2000]


def triton_has_a_compiler() -> bool:
    """Whether Triton finds the C compiler that it builds its launchers with (`triton/runtime/build.py`, 3.7)."""
    named = os.environ.get("CC")
    return any(shutil.which(command) for command in ([named] if named else ["gcc", "clang", "cc"]))


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """True where oneDNN computes matrix products of this half-precision dtype on the CPU, as torch asks it
    (`aten/src/ATen/native/mkldnn/RegisterMkldnnOpContextClass.cpp`); it heeds `ONEDNN_MAX_CPU_ISA`."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    asked = getattr(torch.ops.mkldnn, name, None) if name and torch.backends.mkldnn.is_available() else None
    return bool(asked and asked())


@functools.cache
def has_instructions_for(dtype: torch.dtype) -> bool:
    """True where oneDNN, if it multiplies this half-precision dtype, has instructions for it; else it computes in
    float32. It takes float16 only with them, bfloat16 with any AVX512."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return dtype == torch.float16 or (
        torch.cpu._is_avx512_bf16_supported() and limit not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    )


def cpu_allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes that a call asks torch's CPU allocator for, in order; what it gives back is negative. Empty where another
    profiler is on, or torch has none that tells.

    Kineto takes a tenth of a second to start, and logs; the profiler before it does neither
    (`torch/csrc/autograd/profiler_legacy.h`, 2.13).
    """
    from torch import autograd

    try:
        from torch._C._profiler import _ExperimentalConfig

        state = autograd.ProfilerConfig(
            autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
        )
        autograd._enable_profiler_legacy(state)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return []
    try:
        result = run()
    finally:
        threads = autograd._disable_profiler_legacy()
    del result
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]
