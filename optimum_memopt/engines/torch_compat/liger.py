"""Replacements for code of Liger Kernel that torch cannot trace: how it selects kernels, and its loss without logits.

torch can trace the kernels themselves, each launch as one operator (`torch/_higher_order_ops/triton_kernel_wrap.py`,
2.13).
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from packaging.version import Version
from torch.nn import functional

from optimum_memopt.engines.torch_compat.fake_tensors import Replacement
from optimum_memopt.engines.torch_compat.patches import Name, Patch

_DISPATCH = "liger_kernel.backends.dispatch"
# The operators that a model's modules call through the dispatch.
_OPERATORS = ("rope", "cross_entropy")
# Since 0.8.1, some functions select their kernel at each call, in a function that torch may not trace, which breaks
# the graph in each layer.
LIGER = Patch(
    "Liger Kernel's choice of kernels",
    "each call of Liger Kernel's rotary embedding breaks the graph",
    "liger_kernel",
    since="0.8.1",
    tested="0.8.5",
    names=(
        Name(_DISPATCH, "resolve_impl", ("op_name", "requested", "device")),
        Name(_DISPATCH, "dispatch", ("op_name",)),
    ),
)
# torch 2.11 fails to trace the kernel with sizes that are symbols (`overwrite_tensor_vt_proxy` in
# `torch/_dynamo/variables/higher_order_ops.py`), 2.13 does not.
_TRACES_ROPE = Version(torch.__version__) >= Version("2.13")
_FUNCTIONS, _LOSS = "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
# Liger Kernel's loss without logits waits for the device, and reads attributes of a function that torch cannot trace.
LOSS = Patch(
    "Liger Kernel's loss without logits",
    "Liger Kernel's loss breaks the graph, and its memory is not predicted",
    "liger_kernel",
    since="0.5",
    tested="0.8.5",
    names=(Name(_FUNCTIONS, _LOSS, ("input", "weight", "target", "bias")),),
)


def replacements(device: torch.device, chunks_loss: bool) -> Iterator[Replacement]:
    """Yields replacements for the functions of Liger Kernel that torch cannot trace.

    Args:
        device: the device of their arguments.
        chunks_loss: whether the engine chunks losses; False: Liger Kernel's loss is computed outside of all graphs.
    """
    if chunks_loss and LOSS.applies:
        functions: Any = sys.modules[_FUNCTIONS]
        yield functions, _LOSS, _loss_of_logits(getattr(functions, _LOSS))
    if not LIGER.applies:
        return
    file: Any = sys.modules[_DISPATCH]
    dispatched = _traceable(file, device)
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.") and module is not file and vars(module).get("dispatch") is file.dispatch:
            yield module, "dispatch", dispatched


def _traceable(file: Any, device: torch.device) -> Callable[..., Any]:
    calls: dict[str, Callable[..., Any]] = {}
    for name in _OPERATORS:
        # An operator without a kernel raises at its call. A model on a CPU may be planned for a GPU.
        with contextlib.suppress(RuntimeError):
            calls[name] = file.resolve_impl(name, device=device if device.type == "cuda" else None).call
    if not _TRACES_ROPE and "rope" in calls:
        calls["rope"] = _rope_or(calls["rope"])
    dispatch = file.dispatch

    def dispatched(op_name: str, *args: Any, **kwargs: Any) -> Any:
        if op_name in calls and "impl" not in kwargs and "backend" not in kwargs:
            return calls[op_name](*args, **kwargs)
        return dispatch(op_name, *args, **kwargs)

    return dispatched


def _rope_or(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rotary embedding of a whole head in torch's operators, as `apply_rotary_pos_emb` in transformers'
    `modeling_llama.py`; other ones are computed by Liger Kernel."""

    def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if cos.dim() != 3 or cos.shape[-1] != q.shape[-1] or kwargs.get("rotary_dim") is not None:
            return stock(q, k, cos, sin, *args, **kwargs)
        # Heads are the second dimension, whatever `unsqueeze_dim` is.
        cos, sin = cos.unsqueeze(1).to(q.dtype), sin.unsqueeze(1).to(q.dtype)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-second, first), dim=-1) * sin

        return rotated(q), rotated(k)

    return rope


def _loss_of_logits(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss in torch's operators, which the engine finds in the graph and chunks."""

    # Wrapped, since callers inspect the names of its parameters.
    @functools.wraps(stock)
    def loss(
        input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        **others: Any,
    ) -> Any:
        # Gradients are accumulated in float32 here in any case, and the chunk size does not change the result.
        more = {name for name, value in others.items() if value and name not in ("accum_dtype", "chunk_mem_const")}
        if ce_weight is not None or lse_square_scale or more or reduction not in ("mean", "sum"):
            settings = (bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
            return stock(input, weight, target, *settings, **others)
        logits = functional.linear(input, weight, bias).float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits_loss: torch.Tensor = functional.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )
        return logits_loss

    return loss
