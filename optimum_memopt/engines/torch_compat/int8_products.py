"""bitsandbytes' product with a frozen 8-bit weight on a GPU (LLM.int8(), https://arxiv.org/abs/2208.07339; seen in
bitsandbytes 0.50) as one operator.

Input columns with an outlier are multiplied in half precision. How many there are depends on the data, so
bitsandbytes' function (`MatMul8bitLt` in `bitsandbytes/autograd/_functions.py`) breaks the graph at each product, and
holds its input for the backward, which needs only the weight if that is frozen. The operator has the same kernels
inside, and the sizes of its result do not depend on data.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from optimum_memopt.engines.torch_compat.fake_tensors import Replacement, with_attributes
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.torch_compat.patches import Name, Patch

_PACKAGE, _LAYERS, _FUNCTIONS = "bitsandbytes", "bitsandbytes.nn.modules", "bitsandbytes.autograd._functions"
PRODUCTS = Patch(
    "products with 8-bit weights",
    "bitsandbytes' products with 8-bit weights break the graph of each layer",
    _PACKAGE,
    since="0.46",
    tested="0.50",
    names=(
        Name(_LAYERS, "Linear8bitLt.forward", ("self", "x"), ("is_training", "has_fp16_weights", "CB")),
        Name(_FUNCTIONS, "matmul", ("A", "B", "out", "state", "threshold", "bias")),
        Name(_FUNCTIONS, "MatMul8bitLt.forward", mentions=("int8_vectorwise_quant", "has_fp16_weights")),
        Name(_FUNCTIONS, "MatMul8bitLt.backward", mentions=("SCB", "dtype_A")),
        Name(_FUNCTIONS, "logger"),
    ),
)
# Rows of a weight have their largest number as scale, for a code of 127.
_LARGEST_CODE = 127.0


class _Device:
    """The device that a forward is traced or simulated for.

    Attributes:
        dequantizing: types of devices on which bitsandbytes dequantizes the weight instead, which torch can trace.
    """

    dequantizing: tuple[str, ...] = ("cpu", "xpu")


def as_on_cuda() -> contextlib.AbstractContextManager[Any]:
    """Trace products of CPU tensors within the context as on CUDA."""
    return with_attributes([(_Device, "dequantizing", ())])


@contextlib.contextmanager
def without_outliers() -> Iterator[None]:
    """Run bitsandbytes' products within the context as if no input had outliers, on tensors without data; on CPU
    tensors within `as_on_cuda`, too."""
    if not PRODUCTS.applies:
        yield
        return
    file: Any = sys.modules[_FUNCTIONS]
    names = ("MatMul8bitLt",) if "cpu" in _Device.dequantizing else ("MatMul8bitLt", "MatMul8bitFp")
    replaced = _without_outliers(file.MatMul8bitLt)
    # It warns of each product whose input is not in float16.
    quiet = (file.logger, "disabled", True)
    with with_attributes((quiet, *((file, name, replaced) for name in names))):
        yield


@functools.cache
def _without_outliers(function: Any) -> Any:
    class WithoutOutliers(function):
        @staticmethod
        def forward(ctx: Any, A: Tensor, B: Tensor, out: Any, bias: Any, state: Any) -> Any:
            with with_attributes([(state, "threshold", 0.0)]):
                return function.forward(ctx, A, B, out, bias, state)

    return WithoutOutliers


def replacements() -> Iterator[Replacement]:
    """Yields a replacement for the forward of bitsandbytes' layers of 8 bits; none if bitsandbytes is not imported or
    does not match."""
    if PRODUCTS.applies:
        layer = sys.modules[_LAYERS].Linear8bitLt
        # Another thread that trains may have replaced it.
        yield layer, "forward", _as_operator(inspect.unwrap(layer.forward))


def _as_operator(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def product_forward(product: Any, x: Tensor) -> Tensor:
        state, bias = product.state, product.bias
        if state.CB is None or state.has_fp16_weights or not torch.compiler.is_compiling():
            return forward(product, x)
        state.is_training = product.training
        if bias is not None:
            # The layer's own forward changes the dtype of its bias, which breaks the graph.
            bias = bias.to(x.dtype)
        trains = product.weight.requires_grad or (bias is not None and bias.requires_grad)
        if trains or x.device.type in _Device.dequantizing or x.dim() < 2:
            return sys.modules[_PACKAGE].matmul(x, product.weight, bias=bias, state=state)
        return int8_linear(x, state.CB, state.SCB, bias, state.threshold)

    return product_forward


@torch.library.custom_op(f"{LIBRARY}::int8_linear", mutates_args=())
def int8_linear(given: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    """Multiply by a weight of 8 bits.

    Args:
        given: shape (…, inputs), in any floating dtype; quantized row by row from float16.
        weight: int8, shape (outputs, inputs).
        scales: float32, shape (outputs,).
        threshold: absolute value from which on a number is an outlier; 0: none is.

    Returns:
        The result in the dtype of `given`, shape (…, outputs).
    """
    if not given.numel():
        # Its kernels cannot run for no rows, as of an expert without tokens.
        return given.new_empty((*given.shape[:-1], weight.shape[0]))
    of_bitsandbytes = torch.ops.bitsandbytes
    # The kernels read rows one after the other, and a compiler may have changed the strides.
    rows = given.reshape(-1, given.shape[-1]).contiguous()
    codes, row_scales, outliers = of_bitsandbytes.int8_vectorwise_quant(rows.to(torch.float16), threshold=threshold)
    if threshold > 0:
        result, _ = of_bitsandbytes.int8_mixed_scaled_mm(rows, codes, weight, row_scales, scales, outliers, bias)
    else:
        result = of_bitsandbytes.int8_scaled_mm(codes, weight, row_scales, scales, bias=bias, dtype=given.dtype)
    return result.reshape(*given.shape[:-1], weight.shape[0])


@int8_linear.register_fake
def _(given: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    return given.new_empty((*given.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, weight, scales, *_ = inputs
    ctx.save_for_backward(weight, scales)
    ctx.dtype = given.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Returns the gradient of the input, as `MatMul8bitLt.backward` computes it."""
    weight, scales = ctx.saved_tensors
    dequantized = weight.to(ctx.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / _LARGEST_CODE))
    rows = gradient.reshape(-1, gradient.shape[-1]).to(ctx.dtype)
    of_given = torch.matmul(rows, dequantized).view(*gradient.shape[:-1], weight.shape[1])
    return of_given, None, None, None, None


int8_linear.register_autograd(_backward, setup_context=_setup_context)
