"""The chunked loss: projection to the vocabulary and cross entropy as one operator that never holds all logits.

The forward computes loss and gradients together, a chunk of rows at a time, so that each chunk of logits is computed
once; the backward only multiplies the gradients by that of the loss (Liger Kernel, https://arxiv.org/abs/2410.10989).
Rows without a label are left out first.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimum_memopt.engines.compile.compat_state import backward_runs_once
from optimum_memopt.engines.compile.loss.chunks import LossShape, accumulation_dtype, gradient_dtype, softmax_dtype
from optimum_memopt.engines.compile.operators import LIBRARY


@torch.library.custom_op(f"{LIBRARY}::chunked_loss", mutates_args=())
def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    mean: bool,
    label_smoothing: float,
    compute_dtype: torch.dtype,
    loss_dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cross_entropy(linear(hidden, weight, bias) * scale, labels)`, and its gradients for a loss's gradient of 1.

    Args:
        hidden: (…, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary,), or None.
        labels: (…), integers.
        scale: the logits are multiplied by it.
        softcap: not 0: the logits are `softcap * tanh(scale * logits)`.
        ignore_index: the label of rows that do not count.
        mean: over the rows that count; else their sum.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        compute_dtype: of the products; softmax and loss are at least float32.
        loss_dtype: of the loss.
        needs_hidden: whether the gradient of `hidden` is wanted; an empty tensor comes instead.
        needs_weight: likewise.
        needs_bias: likewise.

    Returns:
        The loss, and the gradients of hidden states, weight and bias in `gradient_dtype` of their own dtypes.

    Raises:
        IndexError: on a CPU, a label that is no class, as PyTorch has it.
    """
    rows_of_hidden, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    counted = (targets != ignore_index).nonzero().squeeze(1)
    count = counted.numel()
    shape = LossShape(
        len(targets), hidden.shape[-1], len(weight), hidden.dtype, weight.dtype, compute_dtype, bool(softcap)
    )
    # Products in float16 take factors of about 1; the small ones come afterwards.
    share = 1 / max(count, 1) if mean else 1.0
    before, after = (1.0, share) if compute_dtype == torch.float16 else (share, 1.0)
    loss_of = _Chunk(
        weight.to(compute_dtype),
        bias if bias is None else bias.to(compute_dtype),
        scale,
        softcap,
        label_smoothing,
        before,
    )
    loss = hidden.new_zeros((), dtype=softmax_dtype(compute_dtype))
    outputs = _empty_gradients(hidden, weight, bias, needs_hidden, needs_weight, needs_bias)
    of_hidden, of_weight, of_bias = outputs
    of_rows = of_hidden.view(rows_of_hidden.shape) if needs_hidden else None
    summed = of_weight if of_weight.dtype == accumulation_dtype(weight.dtype) else None
    if needs_weight:
        summed = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if summed is None else summed.zero_()
    if of_rows is not None and count < len(targets):
        of_rows.zero_()
    of_bias.zero_()
    step = shape.rows_per_chunk
    for start in range(0, count, max(step, 1)):
        rows: Any = slice(start, start + step) if count == len(targets) else counted[start : start + step]
        chunk, target = rows_of_hidden[rows].to(compute_dtype), targets[rows]
        _check_labels(target, len(weight))
        chunk_loss, gradient = loss_of(chunk, target)
        loss += chunk_loss
        if needs_bias:
            of_bias += gradient.sum(0)
        gradient = gradient.to(compute_dtype)
        if of_rows is not None:
            of_rows[rows] = (gradient @ loss_of.weight).to(of_rows.dtype)
        if needs_weight:
            _add_product(summed, gradient, chunk)
        del gradient, chunk
    if summed is not None and summed is not of_weight:
        of_weight.copy_(summed)
    if after != 1:
        for gradient in outputs:
            gradient *= after
    # 0 / 0 where no row counts and the mean is wanted, as PyTorch has it.
    return (loss / count if mean else loss).to(loss_dtype), of_hidden, of_weight, of_bias


@dataclass(frozen=True)
class _Chunk:
    """Loss and gradient of the logits for a chunk of rows.

    Attributes:
        weight: of the projection, in the dtype of the products.
        bias: likewise, or None.
        scale: see `chunked_loss`.
        softcap: see `chunked_loss`.
        label_smoothing: see `chunked_loss`.
        share: gradients are multiplied by it.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float
    label_smoothing: float
    share: float

    def __call__(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the rows' losses, and the gradient (rows, vocabulary) of their logits before the scale."""
        logits = functional.linear(hidden, self.weight, self.bias)
        logits = logits.to(softmax_dtype(logits.dtype))
        capped = None
        if self.softcap:
            capped = logits.mul_(self.scale).tanh_()
            logits = capped * self.softcap
        elif self.scale != 1:
            logits.mul_(self.scale)
        index = targets.unsqueeze(1)
        logits.sub_(logits.amax(1, keepdim=True))
        of_target = logits.gather(1, index)
        smoothing = self.label_smoothing
        mean = logits.mean(1, keepdim=True) if smoothing else of_target
        total = logits.exp_().sum(1, keepdim=True)
        loss = (total.log() - (1 - smoothing) * of_target - smoothing * mean).sum()
        gradient = logits.div_(total / self.share)
        gradient.scatter_(1, index, gradient.gather(1, index) - (1 - smoothing) * self.share)
        if smoothing:
            gradient.sub_(smoothing * self.share / gradient.shape[1])
        if capped is not None:
            gradient = capped.square_().neg_().add_(1).mul_(gradient).mul_(self.scale * self.softcap)
        elif self.scale != 1:
            gradient.mul_(self.scale)
        return loss, gradient


def _add_product(total: Tensor | None, gradient: Tensor, hidden: Tensor) -> None:
    """Add the chunk's gradient of the projection, summed in at least float32."""
    assert total is not None
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total += gradient.t() @ hidden


def _check_labels(labels: Tensor, classes: int) -> None:
    # On CUDA `gather` asserts by itself, and reading the result would wait for the device.
    if labels.device.type == "cpu" and bool(((labels < 0) | (labels >= classes)).any()):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise IndexError(f"Target {int(wrong)} is out of bounds.")


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs_hidden: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    def like(tensor: Tensor | None, is_needed: bool) -> Tensor:
        if tensor is None or not is_needed:
            return hidden.new_empty(0)
        return torch.empty(tensor.shape, dtype=gradient_dtype(tensor.dtype), device=tensor.device)

    return like(hidden, needs_hidden), like(weight, needs_weight), like(bias, needs_bias)


@chunked_loss.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss_dtype, *needs = settings[-4:]
    return (hidden.new_empty((), dtype=loss_dtype), *_empty_gradients(hidden, weight, bias, *needs))


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.needs = inputs[-3:]
    ctx.dtypes = [tensor if tensor is None else tensor.dtype for tensor in inputs[:3]]
    ctx.others = len(inputs) - 3


def _scale_gradients(ctx: Any, gradient: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    scaled = [
        (saved * gradient).to(dtype) if is_needed and gradient is not None else None
        for saved, dtype, is_needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs, strict=True)
    ]
    return (*scaled, *[None] * ctx.others)


chunked_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)

# Torch declares no operator that may or may not return its argument; what reads the graph takes it for a view.
_LIBRARY = torch.library.Library(LIBRARY, "FRAGMENT")
_LIBRARY.define("scaled(Tensor(a) gradient, Tensor factor) -> Tensor(a)")


@torch.library.impl(_LIBRARY, "scaled", "CompositeExplicitAutograd")
def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """`gradient * factor`, in place where no later backward needs `gradient`: the projection's is as large as the
    projection, and needed twice at the peak otherwise."""
    if not backward_runs_once():
        return gradient * factor
    # On other devices reading the factor would wait for them.
    is_one = factor.device.type == "cpu" and factor.item() == 1
    return gradient if is_one else gradient.mul_(factor)


# As a graph calls them.
SCALED = getattr(torch.ops, LIBRARY).scaled.default
CHUNKED_LOSS = getattr(torch.ops, LIBRARY).chunked_loss.default
