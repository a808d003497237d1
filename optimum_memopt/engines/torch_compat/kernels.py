"""Private names of torch and Triton: which kernels run, whether they are correct, and what memory they hold.

Also CUDA's operators for machines without a GPU.
"""

import contextlib
import functools
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from packaging.version import Version
from torch import fx

from optimum_memopt.errors import MemOptError

HALVES = frozenset({torch.bfloat16, torch.float16})
# Half-precision elements in 16 bytes: tensor cores access rows at full rate if they begin at multiples of this.
ALIGNED = 8


@dataclass(frozen=True)
class Multiprocessors:
    """A device's number of multiprocessors and resident threads on each, which decide how a kernel is split."""

    count: int
    threads: int


def multiprocessors_of(device: torch.device) -> Multiprocessors | None:
    """Returns the multiprocessors of a CUDA device of this machine; None for other devices, and for a CUDA device that
    only fake tensors are on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    return Multiprocessors(found.multi_processor_count, found.max_threads_per_multi_processor)


# The first compute capability for which Triton has float8_e4m3fn (`use_uint8_triton_storage_for_cuda_float8_e4m3fn` in
# `torch/_inductor/codegen/triton_utils.py`, 2.13).
_FP8_GPU = (8, 9)


def check_fp8(device: torch.device) -> None:
    """Raise MemOptError for a device on which inductor cannot convert to fp8: an NVIDIA GPU before Ada."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return
    if (found := torch.cuda.get_device_capability(device)) < _FP8_GPU:
        version, needed = (".".join(map(str, each)) for each in (found, _FP8_GPU))
        raise MemOptError(
            f"inductor cannot save activations in fp8 on a GPU of compute capability {version}: Triton needs "
            f"{needed}; use --memory_opt_compiler aot_eager, or leave out --memory_opt_compress and strategy 4"
        )


def inductor_patches() -> dict[str, Any]:
    """Returns settings of inductor that avoid wrong kernels of this release.

    `triton.mix_order_reduction` (on by default since 2.10) computes reductions over rows and over columns in one
    kernel, and reduces its workspace afterwards. If that result is a slice of a larger tensor, the slice is never
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
    """True if Triton finds the C compiler that builds its launchers (`triton/runtime/build.py`, 3.7)."""
    named = os.environ.get("CC")
    return any(shutil.which(command) for command in ([named] if named else ["gcc", "clang", "cc"]))


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """True if oneDNN computes matrix products of this half-precision dtype on the CPU, by torch's own check
    (`aten/src/ATen/native/mkldnn/RegisterMkldnnOpContextClass.cpp`), which respects `ONEDNN_MAX_CPU_ISA`."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    asked = getattr(torch.ops.mkldnn, name, None) if name and torch.backends.mkldnn.is_available() else None
    return bool(asked and asked())


@functools.cache
def has_instructions_for(dtype: torch.dtype) -> bool:
    """True if the CPU has instructions for this half-precision dtype, given that oneDNN multiplies it; else oneDNN
    computes in float32. It accepts float16 only with such instructions, bfloat16 with any AVX512."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return dtype == torch.float16 or (
        torch.cpu._is_avx512_bf16_supported() and limit not in ("AVX512_CORE", "AVX512_CORE_VNNI")
    )


def cpu_allocations(run: Callable[[], Any]) -> list[int]:
    """Returns the bytes that a call requests from torch's CPU allocator, in order; frees are negative.

    Empty if another profiler is on, or torch lacks the legacy profiler. Kineto takes a tenth of a second to start, and
    logs; the legacy profiler does neither (`torch/csrc/autograd/profiler_legacy.h`, 2.13).
    """
    from torch import autograd

    try:
        from torch._C._profiler import _ExperimentalConfig

        switches = False, True, False, False, False
        state = autograd.ProfilerConfig(autograd.ProfilerState.CPU, *switches, _ExperimentalConfig())
        autograd._enable_profiler_legacy(state)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return []
    try:
        result = run()
    finally:
        threads = autograd._disable_profiler_legacy()
    del result
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]


def start_libraries(device: torch.device) -> None:
    """Make cuBLAS allocate its workspaces on a CUDA device of this machine now, so that they count as memory that the
    process holds.

    torch has one workspace per thread and stream (`aten/src/ATen/cuda/CublasHandlePool.cpp`; 32 MiB each on an H100).
    This allocates those of the thread that runs forwards and of autograd's thread for the device.
    """
    if device.type == "cuda" and torch.cuda.is_available():
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            weight, bias = torch.ones(8, 8, device=device, requires_grad=True), torch.ones(8, device=device)
            torch.nn.functional.linear(weight, weight, bias).sum().backward()


_NAN_ISSUE = "https://github.com/pytorch/pytorch/issues/196678"
# PyTorch selects cuDNN's wrong kernels since 2.11; cuDNN 9.26 fixes them (pytorch PR 196861).
_CUDNN_SINCE_TORCH = Version("2.11")
_FIXED_IN_CUDNN = 92600
_CUDNN_GPU = (9, 0)
# Key lengths with wrong gradients: 64 more than a multiple of 128.
_TILE, _REMAINDER = 128, 64


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's kernel for attention that is traced within."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def cudnn_attention_warning(graph: fx.Graph) -> str:
    """Returns why a graph of dynamo must run without cuDNN's attention; empty if it may use it.

    With a mask and some key lengths, gradients of the queries are wrong if a query's scores are all very negative. For
    a symbolic length torch guards on the answer: batches of other lengths have a separate graph, with cuDNN.
    """
    version = torch.backends.cudnn.version()
    is_old = version is not None and version < _FIXED_IN_CUDNN
    is_affected = is_old and Version(torch.__version__) >= _CUDNN_SINCE_TORCH
    if not is_affected or not torch.backends.cuda.cudnn_sdp_enabled() or not any(map(_cudnn_may_fail, graph.nodes)):
        return ""
    number = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    return f"attention with a mask runs without cuDNN {number}, whose backward may give NaN on this GPU ({_NAN_ISSUE})"


def cudnn_may_give_nan(capability: tuple[int, int], length: int | torch.SymInt) -> bool:
    """True if cuDNN's backward may be wrong for a GPU and a length of masked keys."""
    return capability == _CUDNN_GPU and bool(length % _TILE == _REMAINDER)


def _cudnn_may_fail(node: fx.Node) -> bool:
    if node.target is not torch.nn.functional.scaled_dot_product_attention:
        return False
    arguments = dict(zip(("query", "key", "value", "attn_mask"), node.args, strict=False)) | dict(node.kwargs)
    query, key = _example(arguments["query"]), _example(arguments["key"])
    if arguments.get("attn_mask") is None or query is None or key is None:
        return False
    if query.device.type != "cuda" or not is_half(query) or torch.version.hip is not None:
        return False
    return cudnn_may_give_nan(torch.cuda.get_device_capability(query.device), key.shape[-2])


def _example(argument: Any) -> torch.Tensor | None:
    example = argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
    return example if isinstance(example, torch.Tensor) else None


# The operators that `scaled_dot_product_attention` calls on CUDA; their meta functions take fake tensors.
ATTENTION: dict[str, Callable[..., Any]] = {
    "flash": torch.ops.aten._scaled_dot_product_flash_attention,
    "efficient": torch.ops.aten._scaled_dot_product_efficient_attention,
    "cudnn": torch.ops.aten._scaled_dot_product_cudnn_attention,
    "math": torch._scaled_dot_product_attention_math,
}


@contextlib.contextmanager
def fused_dropout() -> Iterator[None]:
    """Make dropout on the CPU save a boolean mask, as CUDA's kernel does; the CPU's own saves one in the input's dtype
    (`aten/src/ATen/native/Dropout.cpp`, 2.13)."""

    def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0] if train and 0 < p < 1 else tensor
        return result

    with torch.library._scoped_library("aten", "IMPL", "AutogradCPU") as library:
        library.impl("dropout", dropout, allow_override=True)
        yield


def foreach_optimizers() -> contextlib.AbstractContextManager[Any]:
    """Make optimizers on the CPU use their foreach implementations, the default on CUDA (`torch/optim/optimizer.py`,
    2.13)."""
    from torch.optim import optimizer

    name = "_get_foreach_kernels_supported_devices"
    return mock.patch.object(optimizer, name, return_value=[*getattr(optimizer, name)(), "cpu"])


def is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALVES


def generator_state(device: torch.device) -> torch.Tensor:
    """Returns a copy of the state of a device's default generator: bytes, on the CPU."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
