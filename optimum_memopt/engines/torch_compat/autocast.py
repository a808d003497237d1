"""CUDA's autocast for CPU tensors on machines without a GPU (`aten/src/ATen/autocast_mode.h` and
`torch/amp/autocast_mode.py`, 2.13)."""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode
from torch.utils import _pytree as pytree

from optimum_memopt.compat.torch import dtype_name
from optimum_memopt.engines.torch_compat.fake_tensors import with_attributes
from optimum_memopt.engines.torch_compat.kernels import HALVES, is_half
from optimum_memopt.logs import get_logger

# Operators that autocast runs in half precision on CUDA, but not on a CPU.
_IN_HALF = (
    "_convolution",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "addmv",
    "addr",
    "chain_matmul",
    "convolution",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "einsum",
    "gru_cell",
    "linalg_multi_dot",
    "lstm_cell",
    "mv",
    "rnn_relu_cell",
    "rnn_tanh_cell",
)
# Operators whose result is float32, unless the call passes a dtype, as cross entropy does.
_TO_FLOAT32 = (
    "cumprod",
    "cumsum",
    "linalg_matrix_norm",
    "linalg_vector_norm",
    "log_softmax",
    "norm",
    "prod",
    "softmax",
    "sum",
)
# Operators that run in the widest dtype of their arguments. All others that only CUDA casts run in float32.
_IN_WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
)
_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"


@contextlib.contextmanager
def casts_of_cuda() -> Iterator[None]:
    """Make autocast on the CPU cast as on CUDA."""
    kernels = _kernels()
    with torch.library._scoped_library("aten", "IMPL", _CPU) as library:
        with warnings.catch_warnings():
            # Overriding the CPU's own rules warns.
            warnings.simplefilter("ignore")
            for name, kernel in kernels.items():
                library.impl(name, kernel, allow_override=True)
        yield


@functools.cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """Returns the replacements of the CPU's autocast kernels, by operator.

    Covers the operators that CUDA casts, and those that only the CPU casts, which then fall through.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    on_cpu, on_cuda = ({name for name in names if has_kernel(name, key)} for key in (_CPU, _CUDA))
    kernels = dict.fromkeys(on_cpu - on_cuda, torch.library.fallthrough_kernel)
    for name in on_cuda:
        packet = name.removeprefix("aten::").partition(".")[0]
        policies = {_IN_HALF: _in_half, _TO_FLOAT32: _to_float32, _IN_WIDEST: _in_widest}
        cast = next((policy for packets, policy in policies.items() if packet in packets), None)
        # An operator without a policy that both cast has the same rule on both: float32 or half precision.
        if cast is not None or name not in on_cpu:
            kernels[name] = _cast_by(cast or _in_float32, name)
    return {name.removeprefix("aten::"): kernel for name, kernel in kernels.items()}


def _cast_by(cast: Callable[[Any, Any], tuple[Any, Any]], name: str) -> Callable[..., Any]:
    """Returns a function that casts an operator's arguments, and calls the operator without autocast."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::").partition(".")[0])
    operator = getattr(packet, name.partition(".")[2] or "default")

    def call(*args: Any, **kwargs: Any) -> Any:
        args, cast_kwargs = cast(args, kwargs)
        # Norms with a dtype are a separate overload.
        called = operator if cast_kwargs.keys() == kwargs.keys() else packet
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return called(*args, **cast_kwargs)

    return call


def _in_float32(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return pytree.tree_map_only(is_half, torch.Tensor.float, (args, kwargs))


def _in_half(args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = torch.get_autocast_dtype("cpu")
    return pytree.tree_map_only(_is_cast, lambda tensor: tensor.to(dtype), (args, kwargs))


def _in_widest(args: Any, kwargs: Any) -> tuple[Any, Any]:
    tensors = filter(_is_cast, pytree.tree_leaves((args, kwargs)))
    is_wide = any(tensor.dtype == torch.float32 for tensor in tensors)
    return _in_float32(args, kwargs) if is_wide else (args, kwargs)


def _to_float32(args: Any, kwargs: Any) -> tuple[Any, Any]:
    is_named = kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)
    return args, kwargs if is_named or not is_half(args[0]) else {**kwargs, "dtype": torch.float32}


def _is_cast(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (*HALVES, torch.float32)


class _PlannedAutocast:
    """Replaces torch's functions that set and get autocast by device type; all act on the CPU's, since CPU tensors
    stand for those of the planned device."""

    def __init__(self) -> None:
        self._dtypes = {"cpu": _GET_DTYPE("cpu")}
        self._outer: list[dict[str, torch.dtype]] = []

    def begin(self) -> None:
        self._outer.append(dict(self._dtypes))

    def end(self) -> None:
        """Restore the dtype of each device type to that at the last `begin`."""
        self._dtypes = self._outer.pop()

    def is_autocast_enabled(self, device_type: str = "cuda") -> bool:
        return _IS_ENABLED("cpu")

    def set_autocast_enabled(self, *args: Any) -> None:
        # The device type defaults to CUDA.
        *device_type, enabled = args
        if enabled and not _IS_ENABLED("cpu"):
            _SET_DTYPE("cpu", self.get_autocast_dtype(*device_type))
        _SET_ENABLED("cpu", enabled)

    def get_autocast_dtype(self, device_type: str = "cuda") -> torch.dtype:
        if _IS_ENABLED("cpu"):
            return _GET_DTYPE("cpu")
        return self._dtypes.get(device_type) or _GET_DTYPE(device_type)

    def set_autocast_dtype(self, device_type: str, dtype: torch.dtype) -> None:
        if _IS_ENABLED("cpu"):
            _SET_DTYPE("cpu", dtype)
        else:
            self._dtypes[device_type] = dtype


_IS_ENABLED, _SET_ENABLED = torch.is_autocast_enabled, torch.set_autocast_enabled
_GET_DTYPE, _SET_DTYPE = torch.get_autocast_dtype, torch.set_autocast_dtype


@contextlib.contextmanager
def of_any_device(has_bfloat16: bool) -> Iterator[None]:
    """Redirect autocast of every device type to the CPU's, and make CUDA's available without a GPU.

    Args:
        has_bfloat16: whether the planned GPU supports bfloat16; False: it only emulates it.
    """
    planned, common = _PlannedAutocast(), torch.cuda.amp.common
    before = _IS_ENABLED("cpu"), _GET_DTYPE("cpu")
    is_off_here = common.amp_definitely_not_available()
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    told: set[torch.dtype] = set()
    cast, context_class = autocast_mode._cast, autocast_mode.autocast
    init, enter, leave = context_class.__init__, context_class.__enter__, context_class.__exit__

    def made_in_step(context: Any, *args: Any, **kwargs: Any) -> None:
        init(context, *args, **kwargs)
        made.add(context)

    def entered(context: Any) -> Any:
        planned.begin()
        if context in made or context._enabled or context.device != "cuda" or not is_off_here:
            return enter(context)
        # Disabled by torch at its creation, or by `enabled=False`, which few callers combine with another dtype.
        is_on = context.fast_dtype != _GET_DTYPE("cuda")
        if context.fast_dtype not in told:
            told.add(context.fast_dtype)
            get_logger().warning(_premade_line(context.fast_dtype, is_on))
        with mock.patch.object(context, "_enabled", is_on):
            return enter(context)

    def left(context: Any, *error: Any) -> Any:
        leave(context, *error)
        planned.end()

    replaced = (
        (torch, "is_autocast_enabled", planned.is_autocast_enabled),
        (torch, "set_autocast_enabled", planned.set_autocast_enabled),
        (torch, "get_autocast_dtype", planned.get_autocast_dtype),
        (torch, "set_autocast_dtype", planned.set_autocast_dtype),
        (torch, "get_autocast_gpu_dtype", planned.get_autocast_dtype),
        (torch, "set_autocast_gpu_dtype", functools.partial(planned.set_autocast_dtype, "cuda")),
        (torch, "is_autocast_cpu_enabled", planned.is_autocast_enabled),
        (torch, "set_autocast_cpu_enabled", planned.set_autocast_enabled),
        (torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bfloat16),
        (common, "amp_definitely_not_available", lambda: False),
        (autocast_mode, "_cast", lambda value, _, dtype: cast(value, "cpu", dtype)),
    )
    with (
        mock.patch.multiple(context_class, __init__=made_in_step, __enter__=entered, __exit__=left),
        with_attributes(replaced),
    ):
        if _IS_ENABLED("cuda"):
            planned.set_autocast_enabled("cuda", True)
        try:
            yield
        finally:
            _SET_ENABLED("cpu", before[0])
            _SET_DTYPE("cpu", before[1])


def _premade_line(dtype: torch.dtype, is_on: bool) -> str:
    name, state, other = dtype_name(dtype), *(("on", "off") if is_on else ("off", "on"))
    return (
        f'torch.autocast("cuda") in {name} is simulated as {state}: it was created before the step, where torch turns '
        f"it off for lack of a GPU; create it in the step to have it {other}"
    )
