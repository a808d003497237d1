"""Triton kernels that a model calls, as Liger Kernel's: what torch needs to trace them, and Python to run a forward
with them on tensors without data.

torch traces a launch as one operator (`torch/_higher_order_ops/triton_kernel_wrap.py`, 2.13). Where Python runs a
forward on fake tensors, a launch asks for their addresses; results are allocated before it, so that it may do nothing.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from optimum_memopt.engines.compile.torch_compat.fake_tensors import FakeTensor, Replacement
from optimum_memopt.engines.compile.torch_compat.patches import Name, Patch

_DISPATCH = "liger_kernel.backends.dispatch"
# That modules of models call by it.
_OPERATORS = ("rope", "cross_entropy")
# Since 0.8.1 some functions of Liger Kernel look up the kernel for the device at each call, which torch is told not to
# trace: a graph break in each layer.
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


_FUNCTIONS, _LOSS = "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"
# Its loss without logits waits for the device, and reads attributes of a function that torch cannot trace.
LOSS = Patch(
    "Liger Kernel's loss without logits",
    "Liger Kernel's loss ends the graph, and its memory is not predicted",
    "liger_kernel",
    since="0.5",
    tested="0.8.5",
    names=(Name(_FUNCTIONS, _LOSS, ("input", "weight", "target", "bias")),),
)


def replacements(device: torch.device, chunks_loss: bool) -> Iterator[Replacement]:
    """Those of Liger Kernel's functions that torch does not trace, for tensors of this device.

    Args:
        chunks_loss: the engine chunks losses. Else Liger Kernel's is computed outside of all graphs.
    """
    functions: Any = sys.modules.get(_FUNCTIONS)
    if chunks_loss and functions is not None and not LOSS.problem():
        yield functions, _LOSS, _loss_of_logits(getattr(functions, _LOSS))
    file: Any = sys.modules.get(_DISPATCH)
    if file is None or not LIGER.applies:
        return
    dispatched = _traceable(file, device)
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.") and module is not file and vars(module).get("dispatch") is file.dispatch:
            yield module, "dispatch", dispatched


def _traceable(file: Any, device: torch.device) -> Callable[..., Any]:
    calls: dict[str, Callable[..., Any]] = {}
    for name in _OPERATORS:
        # One that there is no kernel for is refused where it is called. A model on a CPU may be planned for a GPU.
        with contextlib.suppress(RuntimeError):
            calls[name] = file.resolve_impl(name, device=device if device.type == "cuda" else None).call
    dispatch = file.dispatch

    def dispatched(op_name: str, *args: Any, **kwargs: Any) -> Any:
        if op_name in calls and "impl" not in kwargs and "backend" not in kwargs:
            return calls[op_name](*args, **kwargs)
        return dispatch(op_name, *args, **kwargs)

    return dispatched


def _loss_of_logits(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The loss as torch writes it, which the engine finds and computes without all logits, too."""

    # Who calls it asks for the names of its parameters.
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
        # The type in which gradients are summed is float32 here in any case, and the size of chunks is no result.
        more = {name for name, value in others.items() if value and name not in ("accum_dtype", "chunk_mem_const")}
        if ce_weight is not None or lse_square_scale or more or reduction not in ("mean", "sum"):
            settings = (bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
            return stock(input, weight, target, *settings, **others)
        logits = functional.linear(input, weight, bias).float()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        how: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
        }
        return functional.cross_entropy(logits, target, **how)

    return loss


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Within it launches with fake tensors do nothing (`triton/runtime/jit.py`, `autotuner.py`, 3.7)."""
    triton: Any = sys.modules.get("triton.runtime")
    if triton is None:
        yield
        return
    classes = (triton.JITFunction, triton.Autotuner, triton.Heuristics)
    # A class has no dict that can be written to.
    before = [(each, each.run) for each in classes]
    for each, run in before:
        each.run = _unless_fake(run)
    try:
        yield
    finally:
        for each, run in before:
            each.run = run


def _unless_fake(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, FakeTensor) for arg in tree_leaves((args, kwargs))):
            return None
        return run(self, *args, **kwargs)

    return launched
