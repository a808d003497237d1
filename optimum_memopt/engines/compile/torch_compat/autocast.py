"""The private names of torch that stand for CUDA's operators and its autocast, used where there is no device."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class AttentionOperators(NamedTuple):
    """What `scaled_dot_product_attention` calls on CUDA; each has a meta function, so that fake tensors will do."""

    flash: Callable[..., Any]
    efficient: Callable[..., Any]
    cudnn: Callable[..., Any]
    math: Callable[..., Any]


def attention_operators() -> AttentionOperators:
    """Of this release."""
    aten = torch.ops.aten
    return AttentionOperators(
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        torch._scaled_dot_product_attention_math,
    )


# Operators that autocast runs in float32 on CUDA and leaves alone on a CPU (`aten/src/ATen/autocast_mode.h`, 2.13), as
# far as transformers' models have them.
_IN_FLOAT32 = (
    "binary_cross_entropy_with_logits",
    "exp",
    "group_norm",
    "layer_norm",
    "log",
    "logsumexp",
    "mse_loss",
    "nll_loss",
    "nll_loss_nd",
    "pow.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "reciprocal",
    "rsqrt",
)
# Those whose result it makes float32.
_TO_FLOAT32 = ("cumsum", "log_softmax.int", "prod", "softmax.int", "sum", "sum.dim_IntList")


@contextlib.contextmanager
def autocast_lists() -> Iterator[None]:
    """Autocast on the CPU casts as it does on CUDA."""
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        with warnings.catch_warnings():
            # The CPU has rules of its own for some.
            warnings.simplefilter("ignore")
            for name in _IN_FLOAT32:
                library.impl(name, _in_float32(_overload(name)), allow_override=True)
            for name in _TO_FLOAT32:
                library.impl(name, _to_float32(_overload(name)), allow_override=True)
        yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_float32, (args, kwargs))
        with _without_autocast():
            return operator(*args, **kwargs)

    return call


def _to_float32(operator: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dtype") is None and _is_half(args[0]):
            kwargs = {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return operator(*args, **kwargs)

    return call


def _without_autocast() -> contextlib.AbstractContextManager:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value
