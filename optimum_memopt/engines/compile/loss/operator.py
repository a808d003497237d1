"""The chunked loss: projection to the vocabulary and cross entropy as one operator that never holds all logits.

The forward computes loss and gradients together, a chunk of rows at a time, so that each chunk of logits is computed
once; the backward only multiplies the gradients by that of the loss (Liger Kernel, https://arxiv.org/abs/2410.10989).
Rows without a label are left out first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.joint import first_input, is_chunked_loss, is_scaling
from optimum_memopt.engines.compile.graph.saved_activations import is_output
from optimum_memopt.engines.compile.loss.chunks import LossShape, accumulation_dtype, gradient_dtype, softmax_dtype
from optimum_memopt.engines.compile.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.compile.torch_compat.runtime import backward_runs_once

# How many of the operator's first arguments are tensors that may get a gradient.
_DIFFERENTIABLE = 5
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op(f"{LIBRARY}::chunked_loss", mutates_args=())
def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter_hidden: Tensor | None,
    adapter_weight: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    mean: bool,
    label_smoothing: float,
    compute_dtype: torch.dtype,
    loss_dtype: torch.dtype,
    needs: list[bool],
) -> Outputs:
    """Cross entropy of `scale * (linear(hidden, weight, bias) + linear(adapter_hidden, adapter_weight))` with the
    labels, and its gradients for a loss's gradient of 1.

    Args:
        hidden: (…, hidden size).
        weight: (vocabulary, hidden size).
        bias: (vocabulary,), or None.
        adapter_hidden: (…, rank), the hidden states after the first matrix of a LoRA on the projection; None without.
        adapter_weight: (vocabulary, rank), its second matrix; None without.
        labels: (…), integers.
        scale: the logits are multiplied by it.
        softcap: not 0: they become `softcap * tanh` of that.
        ignore_index: the label of rows that do not count.
        mean: over the rows that count; else their sum.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        compute_dtype: of the products; softmax and loss are at least float32.
        loss_dtype: of the loss.
        needs: of which of the first five arguments a gradient is wanted; empty tensors come for the others.

    Returns:
        The loss, and the gradients of the first five arguments in `gradient_dtype` of their own dtypes.

    Raises:
        IndexError: on a CPU, a label that is no class, as PyTorch has it.
    """
    gradients = _empty_gradients((hidden, weight, bias, adapter_hidden, adapter_weight), needs)
    targets = labels.reshape(-1)
    counted = (targets != ignore_index).nonzero().squeeze(1)
    count, total = counted.numel(), len(targets)
    # Products in float16 take factors of about 1; the small ones come afterwards.
    share = 1 / max(count, 1) if mean else 1.0
    before, after = (1.0, share) if compute_dtype == torch.float16 else (share, 1.0)
    terms = [_Term(hidden, weight, gradients[0], gradients[1], compute_dtype, total - count)]
    if adapter_hidden is not None and adapter_weight is not None:
        terms.append(_Term(adapter_hidden, adapter_weight, gradients[3], gradients[4], compute_dtype, total - count))
    step = LossShape(total, hidden.shape[-1], len(weight), hidden.dtype, weight.dtype, compute_dtype).rows_per_chunk
    of_logits = _Loss(
        bias if bias is None else bias.to(compute_dtype),
        scale,
        softcap,
        label_smoothing,
        before,
        _logits_buffer(weight, compute_dtype, min(step, count)),
    )
    loss = hidden.new_zeros((), dtype=softmax_dtype(compute_dtype))
    of_bias = gradients[2].zero_()
    for start in range(0, count, max(step, 1)):
        rows: Any = slice(start, start + step) if count == total else counted[start : start + step]
        target = targets[rows]
        _check_labels(target, len(weight))
        chunks = [term.rows(rows) for term in terms]
        chunk_loss, gradient = of_logits(terms, chunks, target)
        loss += chunk_loss
        if len(of_bias):
            of_bias += gradient.sum(0)
        gradient = gradient.to(compute_dtype)
        for term, chunk in zip(terms, chunks, strict=True):
            term.add(gradient, chunk, rows)
        del gradient, chunks
    for term in terms:
        term.finish()
    if after != 1:
        for tensor in gradients:
            tensor *= after
    # 0 / 0 where no row counts and the mean is wanted, as PyTorch has it.
    return cast("Outputs", ((loss / count if mean else loss).to(loss_dtype), *gradients))


class _Term:
    """One product of the logits, with its gradients.

    Args:
        hidden: (…, width).
        weight: (vocabulary, width).
        of_hidden: gets the gradient of `hidden`; empty where none is wanted.
        of_weight: likewise.
        dtype: of the products.
        unread: how many rows do not count.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        of_hidden: Tensor,
        of_weight: Tensor,
        dtype: torch.dtype,
        unread: int,
    ) -> None:
        self.weight = weight.to(dtype)
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        self._of_hidden = of_hidden.view(self._hidden.shape) if of_hidden.dim() > 1 else None
        if self._of_hidden is not None and unread:
            self._of_hidden.zero_()
        self._of_weight = of_weight
        self._sum = None
        if of_weight.dim() > 1:
            summed = accumulation_dtype(weight.dtype)
            self._sum = of_weight.zero_() if of_weight.dtype == summed else torch.zeros_like(weight, dtype=summed)

    def rows(self, rows: Any) -> Tensor:
        """Some of the hidden states, in the dtype of the products."""
        return self._hidden[rows].to(self.weight.dtype)

    def add(self, gradient: Tensor, hidden: Tensor, rows: Any) -> None:
        """Add the gradients of a chunk.

        Args:
            gradient: of its logits, (rows, vocabulary), in the dtype of the products.
            hidden: its hidden states.
            rows: which they are.
        """
        if self._of_hidden is not None:
            self._of_hidden[rows] = (gradient @ self.weight).to(self._of_hidden.dtype)
        if self._sum is None:
            return
        if self._sum.dtype == gradient.dtype:
            self._sum.addmm_(gradient.t(), hidden)
        else:
            self._sum += gradient.t() @ hidden

    def finish(self) -> None:
        """Round the sum of the weight's gradients to its dtype."""
        if self._sum is not None and self._sum is not self._of_weight:
            self._of_weight.copy_(self._sum)


@dataclass(frozen=True)
class _Loss:
    """Loss of a chunk of rows, and the gradient of their logits.

    Attributes:
        bias: (vocabulary,) in the dtype of the products, or None.
        scale: see `chunked_loss`.
        softcap: see `chunked_loss`.
        label_smoothing: see `chunked_loss`.
        share: gradients are multiplied by it.
        buffer: for the logits of a chunk; None: each chunk allocates its own.
    """

    bias: Tensor | None
    scale: float
    softcap: float
    label_smoothing: float
    share: float
    buffer: Tensor | None

    def __call__(self, terms: Sequence[_Term], hidden: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the rows' losses, and the gradient (rows, vocabulary) of the sum of their products.

        Args:
            terms: whose products are the logits.
            hidden: the rows of each.
            targets: (rows,).
        """
        logits = self._product(hidden[0], terms[0].weight)
        for term, chunk in zip(terms[1:], hidden[1:], strict=True):
            logits.addmm_(chunk, term.weight.t())
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

    def _product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self.buffer is None:
            return torch.nn.functional.linear(hidden, weight, self.bias)
        out = self.buffer[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(self.bias, hidden, weight.t(), out=out)


def _logits_buffer(weight: Tensor, dtype: torch.dtype, rows: int) -> Tensor | None:
    """What all chunks write their logits to: on a CPU, new pages would take a third of a projection's time. None in
    a lower precision than the softmax's, where it would be held beside the softmax."""
    return weight.new_empty((rows, len(weight)), dtype=dtype) if dtype == softmax_dtype(dtype) else None


def _check_labels(labels: Tensor, classes: int) -> None:
    # On CUDA `gather` asserts by itself, and reading the result would wait for the device.
    if labels.device.type == "cpu" and bool(((labels < 0) | (labels >= classes)).any()):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise IndexError(f"Target {int(wrong)} is out of bounds.")


def _empty_gradients(tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    assert tensors[0] is not None
    return tuple(
        torch.empty(tensor.shape, dtype=gradient_dtype(tensor.dtype), device=tensor.device)
        if tensor is not None and is_needed
        else tensors[0].new_empty(0)
        for tensor, is_needed in zip(tensors, needs, strict=True)
    )


@chunked_loss.register_fake
def _(hidden: Tensor, *others: Any) -> Outputs:
    *_, loss_dtype, needs = others
    tensors = (hidden, *others[: _DIFFERENTIABLE - 1])
    return cast("Outputs", (hidden.new_empty((), dtype=loss_dtype), *_empty_gradients(tensors, needs)))


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])
    ctx.needs = inputs[-1]
    ctx.dtypes = [tensor if tensor is None else tensor.dtype for tensor in inputs[:_DIFFERENTIABLE]]
    ctx.others = len(inputs) - _DIFFERENTIABLE


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
CHUNKED_LOSS = getattr(torch.ops, LIBRARY).chunked_loss.default
SCALED = getattr(torch.ops, LIBRARY).scaled.default


def scale_in_place(modules: Modules) -> None:
    """Rewrite the backward graph; for backwards that run operator by operator, since inductor reuses its inputs."""
    forward, backward = modules
    saved = {
        node.name
        for node in forward.graph.nodes
        if is_output(node) and is_chunked_loss(first_input(node)) and node.args[1] != 0
    }
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in saved and len(node.users) == 1 and is_scaling(reader := next(iter(node.users)), node):
            reader.target = SCALED
    backward.recompile()
