"""How many rows of logits the chunked loss computes at a time, and what it holds meanwhile. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import elements, tensor_value

# A number of rows or bytes: an integer, or an expression in the symbols of a graph.
Size = Any


@dataclass(frozen=True)
class LossShape:
    """The sizes of a chunked loss; rows and what follows from them may be symbolic.

    Attributes:
        rows: tokens, with and without a label.
        hidden_size: width of the hidden states.
        vocabulary: number of classes.
        hidden: dtype of the hidden states.
        weight: dtype of the projection.
        compute: dtype of the products; that of autocast where it is on.
        has_softcap: the logits go through a soft cap.
        needs_hidden: the gradient of the hidden states is wanted.
        needs_weight: the gradient of the projection is wanted.
        rank: of a LoRA on the projection, 0 without.
    """

    rows: Size
    hidden_size: int
    vocabulary: int
    hidden: torch.dtype
    weight: torch.dtype
    compute: torch.dtype
    has_softcap: bool = False
    needs_hidden: bool = True
    needs_weight: bool = True
    rank: int = 0

    def with_rows(self, rows: Size) -> "LossShape":
        """The same for another batch."""
        return replace(self, rows=rows)

    @property
    def saving(self) -> Size:
        """Bytes saved for backward: the logits, less the gradients that are saved in their place. The hidden states
        would be saved for the projection's gradient too."""
        logits = self.rows * self.vocabulary * softmax_dtype(self.compute).itemsize
        of_hidden = self.rows * self.hidden_size * gradient_dtype(self.hidden).itemsize if self.needs_hidden else 0
        if not self.needs_weight:
            return logits - of_hidden
        of_weight = self.vocabulary * self.hidden_size * gradient_dtype(self.weight).itemsize
        return logits + self.rows * self.hidden_size * self.hidden.itemsize - of_hidden - of_weight

    @property
    def rows_per_chunk(self) -> Size:
        """As many that a chunk of logits is about as large as the projection's weight, whose gradient is in memory
        from then on in any case; more where all hidden states are larger still, since each chunk reads and writes that
        gradient once. Liger Kernel takes the second bound alone (`ops/fused_linear_cross_entropy.py`)."""
        as_hidden_states = self.rows * self.hidden_size // self.vocabulary
        return _min(self.rows, _max(_max(self.hidden_size, as_hidden_states), 1))

    @property
    def workspace(self) -> Size:
        """Bytes of tensors beside the operator's outputs at its peak, an upper bound: all rows have a label."""
        rows, vocabulary, width = self.rows_per_chunk, self.vocabulary, self.hidden_size
        compute, softmax = self.compute.itemsize, softmax_dtype(self.compute).itemsize
        is_low = compute < softmax
        # Of int64, the indices of the rows that count.
        held = 8 * self.rows + rows * width * self.hidden.itemsize
        if self.hidden != self.compute:
            held += rows * width * compute
        if self.weight != self.compute:
            held += vocabulary * width * compute
        # Matrix, its gradient's sum and a chunk's share of it, and hidden states.
        held += self.rank * (vocabulary * (2 * compute + softmax) + 2 * rows * compute)
        logits = rows * vocabulary * (softmax * (2 if self.has_softcap else 1))
        if is_low:
            logits = _max(logits, rows * vocabulary * (softmax + compute))
        products = rows * width * compute if self.needs_hidden else 0
        if self.needs_weight and is_low:
            products = _max(products, vocabulary * width * compute)
        if self.needs_weight and accumulation_dtype(self.weight) != gradient_dtype(self.weight):
            held += vocabulary * width * accumulation_dtype(self.weight).itemsize
        return held + _max(logits, rows * vocabulary * compute + products)


def loss_shape(arguments: Sequence[Any]) -> LossShape:
    """The sizes of a chunked loss.

    Args:
        arguments: of the operator, tensors as they are or as nodes of a joint graph.
    """
    arguments = [tensor_value(value) if isinstance(value, fx.Node) else value for value in arguments]
    hidden, weight, _, _, adapter_weight, labels, _, softcap, *_ = arguments
    compute, _, needs = arguments[-3:]
    vocabulary, hidden_size = weight.shape
    return LossShape(
        elements(labels),
        int(hidden_size),
        int(vocabulary),
        hidden.dtype,
        weight.dtype,
        compute,
        bool(softcap),
        needs[0],
        needs[1],
        int(adapter_weight.shape[1]) if adapter_weight is not None else 0,
    )


def softmax_dtype(compute: torch.dtype) -> torch.dtype:
    """The dtype of softmax and loss: at least float32, as transformers casts its logits."""
    return torch.promote_types(compute, torch.float32)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient waits for the backward; float16 would lose it until a GradScaler multiplies it."""
    return torch.float32 if dtype == torch.float16 else dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the chunks' gradients of the projection are summed."""
    return torch.promote_types(dtype, torch.float32)


def _min(left: Size, right: Size) -> Size:
    return sympy.Min(left, right) if _is_symbolic(left, right) else min(left, right)


def _max(left: Size, right: Size) -> Size:
    return sympy.Max(left, right) if _is_symbolic(left, right) else max(left, right)


def _is_symbolic(*sizes: Size) -> bool:
    return any(isinstance(size, sympy.Basic) for size in sizes)
