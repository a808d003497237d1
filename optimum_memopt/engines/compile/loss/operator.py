"""The chunked loss: projection to the vocabulary and cross entropy as one operator that never holds all logits.

The forward computes loss and gradients together, a chunk of rows at a time, so that each chunk of logits is computed
once; the backward only multiplies the gradients by that of the loss (Liger Kernel, https://arxiv.org/abs/2410.10989).
Rows without a label are left out first. The host must know how many they are; `labels_ignored` queries the device at
the beginning of the forward, so that the count is there when the host reaches the loss, before the device has run the
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from optimum_memopt.engines.compile.graph.analyzed_graph import Modules
from optimum_memopt.engines.compile.graph.joint import is_loss_gradient, is_scaling, tensor_value
from optimum_memopt.engines.compile.loss.chunk import CrossEntropy, columns, is_fused, loss_and_gradient, sum_dtype
from optimum_memopt.engines.simulator.own_operators import register_sizes
from optimum_memopt.engines.torch_compat.dynamo import backward_runs_once
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.torch_compat.kernels import ALIGNED
from optimum_memopt.engines.torch_compat.traced_sizes import elements

# A number of rows or bytes: an integer, or an expression in the symbols of a graph.
Size = Any
# Passes over the logits, by single operators and by the fused kernels of `chunk`. The products are compute-bound.
_PASSES, _FUSED_PASSES = 11, 3
# Parts of the classes, for which a chunk computes the weight's gradient in turn if it is in half precision: each part
# is a separate product before it is added. With more parts, an H100 would idle at the end of each product for a weight
# as small as RoBERTa's.
_PARTS = 4


@dataclass(frozen=True)
class LossShape:
    """The sizes of a chunked loss; rows and sizes derived from them may be symbolic.

    Attributes:
        compute: dtype of the products; autocast's dtype if it is on.
        rank: rank of a LoRA on the projection; 0: there is none.
        is_fused: see `chunk.is_fused`.
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
    is_fused: bool = False

    @property
    def columns(self) -> int:
        """Returns the columns of a chunk's logits, padding included."""
        return columns(self.vocabulary, self.compute, self.is_fused)

    @property
    def columns_per_part(self) -> int:
        """Returns the columns of a chunk's logits that make up one part of the weight's gradient."""
        return -(-self.columns // (_PARTS * ALIGNED)) * ALIGNED

    @property
    def moved(self) -> Size:
        """Returns the bytes of logits that are read and written."""
        if self.is_fused:
            return _FUSED_PASSES * self.rows * self.columns * self.compute.itemsize
        return _PASSES * self.rows * self.vocabulary * sum_dtype(self.compute).itemsize

    @property
    def flops(self) -> Size:
        """Returns the floating point operations: a product for the logits, and one for each gradient."""
        return 2 * self.rows * self.hidden_size * self.vocabulary * (1 + self.needs_hidden + self.needs_weight)

    @property
    def saving(self) -> Size:
        """Returns the bytes that need not be saved for the backward: the logits, and the hidden states for the
        projection's gradient, less the gradients that are saved in their place."""
        logits = self.rows * self.vocabulary * sum_dtype(self.compute).itemsize
        of_hidden = self.rows * self.hidden_size * gradient_dtype(self.hidden).itemsize if self.needs_hidden else 0
        if not self.needs_weight:
            return logits - of_hidden
        of_weight = self.vocabulary * self.hidden_size * gradient_dtype(self.weight).itemsize
        return logits + self.rows * self.hidden_size * self.hidden.itemsize - of_hidden - of_weight

    @property
    def rows_per_chunk(self) -> Size:
        """Returns the number of rows for which a chunk of logits is about as large as the projection's weight, whose
        gradient is in memory from then on anyway; more if all hidden states are larger still, since each chunk reads
        and writes that gradient once. Liger Kernel uses only the second bound
        (`ops/fused_linear_cross_entropy.py`)."""
        as_hidden_states = self.rows * self.hidden_size // self.vocabulary
        return sympy.Min(self.rows, sympy.Max(self.hidden_size, as_hidden_states, 1))

    @property
    def workspace(self) -> Size:
        """Returns an upper bound of the operator's peak bytes without its outputs; it assumes that all rows have a
        label."""
        rows, vocabulary, width = self.rows_per_chunk, self.columns, self.hidden_size
        compute, softmax = self.compute.itemsize, sum_dtype(self.compute).itemsize
        is_low = compute < softmax
        # The int64 indices of the rows that count, and a chunk's hidden states.
        held = 8 * self.rows + rows * width * self.hidden.itemsize
        if self.hidden != self.compute:
            held += rows * width * compute
        if self.weight != self.compute or vocabulary != self.vocabulary:
            held += vocabulary * width * compute
        # The LoRA's matrix, the sum of its gradient and a chunk's share of it, and its hidden states.
        held += self.rank * (vocabulary * (2 * compute + softmax) + 2 * rows * compute)
        logits = rows * vocabulary * (softmax * (2 if self.has_softcap else 1))
        if self.is_fused:
            logits = rows * vocabulary * compute
        elif is_low:
            logits = sympy.Max(logits, rows * vocabulary * (softmax + compute))
        products = rows * width * compute if self.needs_hidden else 0
        if self.needs_weight and is_low:
            products = sympy.Max(products, self.columns_per_part * width * compute)
        if self.needs_weight and sum_dtype(self.weight) != gradient_dtype(self.weight):
            held += self.vocabulary * width * sum_dtype(self.weight).itemsize
        return held + sympy.Max(logits, rows * vocabulary * compute + products)


def loss_shape(arguments: Sequence[Any], on_cuda: bool) -> LossShape:
    """Returns the sizes of a chunked loss.

    Args:
        arguments: the operator's arguments, as tensors or as nodes of a joint graph.
        on_cuda: the loss runs on CUDA, whatever the device of these tensors.
    """
    arguments = [tensor_value(value) if isinstance(value, fx.Node) else value for value in arguments]
    hidden, weight, _, _, adapter_weight, labels, _, _, softcap, *_ = arguments
    compute, _, needs = arguments[-3:]
    vocabulary, hidden_size = weight.shape
    rank = int(adapter_weight.shape[1]) if adapter_weight is not None else 0
    sizes, dtypes = (elements(labels), int(hidden_size), int(vocabulary)), (hidden.dtype, weight.dtype, compute)
    return LossShape(*sizes, *dtypes, bool(softcap), needs[0], needs[1], rank, is_fused(on_cuda))


register_sizes("optimum_memopt.chunked_loss.default", loss_shape)


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a gradient waits for the backward; not float16, in which it would underflow before a
    GradScaler multiplies it."""
    return torch.float32 if dtype == torch.float16 else dtype


# By device, the event recorded after counting the labels of the latest forward.
_counted: dict[torch.device, torch.cuda.Event] = {}


@torch.library.custom_op(f"{LIBRARY}::labels_ignored", mutates_args=())
def labels_ignored(labels: Tensor, ignore_index: int) -> Tensor:
    """Returns the number of ignored labels, (1,) in int64 on the host, written once the device gets there."""
    ignored = (labels == ignore_index).sum().view(1)
    if ignored.device.type != "cuda":
        return ignored.cpu()
    on_host = torch.empty(1, dtype=torch.int64, pin_memory=True).copy_(ignored, non_blocking=True)
    _counted[ignored.device] = event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(ignored.device))
    return on_host


@labels_ignored.register_fake
def _(labels: Tensor, ignore_index: int) -> Tensor:
    return labels.new_empty(1, dtype=torch.int64, device="cpu")


def _rows_with_label(targets: Tensor, ignore_index: int, ignored: Tensor) -> Tensor:
    """Returns the indices of rows with a label, in order; waits until the device has run `labels_ignored`."""
    is_counted = targets != ignore_index
    if (event := _counted.get(targets.device)) is None:
        return is_counted.nonzero().squeeze(1)
    event.synchronize()
    # On a device without kernels, such as the tests' fake device, the count is undefined.
    size = min(max(len(targets) - int(ignored), 0), len(targets))
    found: Tensor = torch.nonzero_static(is_counted, size=size).squeeze(1)
    return found


# Number of the operator's first arguments that are tensors which may get a gradient.
_DIFFERENTIABLE = 5
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op(f"{LIBRARY}::chunked_loss", mutates_args=())
def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter_hidden: Tensor | None,
    adapter_weight: Tensor | None,
    labels: Tensor,
    ignored: Tensor,
    scale: float,
    softcap: float,
    ignore_index: int,
    mean: bool,
    label_smoothing: float,
    compute_dtype: torch.dtype,
    loss_dtype: torch.dtype,
    needs: list[bool],
) -> Outputs:
    """Computes the cross entropy of `scale * (linear(hidden, weight, bias) + linear(adapter_hidden, adapter_weight))`
    with the labels, and its gradients for a loss gradient of 1.

    Args:
        hidden: (…, hidden size).
        bias: (vocabulary,), or None.
        adapter_hidden: (…, rank), the hidden states after the first matrix of a LoRA on the projection, or None.
        adapter_weight: (vocabulary, rank), the LoRA's second matrix, or None.
        ignored: the result of `labels_ignored`.
        softcap: not 0: the scaled logits become `softcap * tanh` of them.
        needs: for each of the first five arguments, whether its gradient is needed; the others' are empty tensors.

    Returns:
        The loss, the gradients of the first five arguments in `gradient_dtype` of their own dtypes, and whether any
        row counts (a bool without dimensions).

    Raises:
        IndexError: on a CPU, a label is not a class, as in PyTorch.
    """
    gradients = _empty_gradients((hidden, weight, bias, adapter_hidden, adapter_weight), needs)
    targets = labels.reshape(-1)
    counted = _rows_with_label(targets, ignore_index, ignored)
    count, total = counted.numel(), len(targets)
    # Products in float16 need factors of about 1; a small factor is applied afterwards.
    share = 1 / max(count, 1) if mean else 1.0
    before, after = (1.0, share) if compute_dtype == torch.float16 else (share, 1.0)
    fused = is_fused(hidden.is_cuda)
    shape = LossShape(total, hidden.shape[-1], len(weight), hidden.dtype, weight.dtype, compute_dtype, is_fused=fused)
    padding = shape.columns - len(weight)
    sizes = compute_dtype, total - count, padding, shape.columns_per_part
    terms = [_Term(hidden, weight, gradients[0], gradients[1], *sizes)]
    if adapter_hidden is not None and adapter_weight is not None:
        of_adapter = adapter_hidden, adapter_weight, gradients[3], gradients[4]
        terms.append(_Term(*of_adapter, *sizes))
    of = CrossEntropy(len(weight), scale, softcap, label_smoothing)
    step = int(shape.rows_per_chunk)
    buffer = None
    if compute_dtype == sum_dtype(compute_dtype):
        # On a CPU, new pages for each chunk's logits would take a third of a projection's time. If the products had a
        # lower precision than the softmax, the buffer would be held in addition to the softmax.
        buffer = weight.new_empty((min(step, count), shape.columns), dtype=compute_dtype)
    logits_bias = bias if bias is None else _padded(bias, compute_dtype, padding)
    loss = hidden.new_zeros((), dtype=sum_dtype(compute_dtype))
    of_bias = gradients[2].zero_()
    for start in range(0, count, max(step, 1)):
        rows: Any = slice(start, start + step) if count == total else counted[start : start + step]
        target = targets[rows]
        # On CUDA `gather` itself asserts this, and reading the result would wait for the device.
        if target.device.type == "cpu" and len(wrong := target[(target < 0) | (target >= len(weight))]):
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
        chunks = [term.rows(rows) for term in terms]
        # Not assigned to a variable, which would keep the logits alive next to their gradient in a lower precision.
        chunk_loss, gradient = loss_and_gradient(
            _logits(terms, chunks, logits_bias, buffer, fused), target, of, before, fused
        )
        loss += chunk_loss
        if len(of_bias):
            of_bias += gradient.sum(0, dtype=sum_dtype(gradient.dtype))[: len(of_bias)]
        gradient = gradient.to(compute_dtype)
        for term, chunk in zip(terms, chunks, strict=True):
            term.add(gradient, chunk, rows)
        del gradient, chunks
    for term in terms:
        term.finish()
    if after != 1:
        for tensor in gradients:
            tensor *= after
    # 0 / 0 if no row counts and the mean is requested, as in PyTorch.
    has_rows = torch.full((), count > 0, device=hidden.device)
    return cast("Outputs", ((loss / count if mean else loss).to(loss_dtype), *gradients, has_rows))


class _Term:
    """One product that is added to the logits, with the gradients of its factors (empty: not needed).

    If a weight's gradient has another dtype than the products, it is computed in parts of `part` classes.

    Args:
        unread: number of rows that do not count.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        of_hidden: Tensor,
        of_weight: Tensor,
        dtype: torch.dtype,
        unread: int,
        padding: int,
        part: int,
    ) -> None:
        self.weight = _padded(weight, dtype, padding)
        self._hidden = hidden.reshape(-1, hidden.shape[-1])
        self._of_hidden = of_hidden.view(self._hidden.shape) if of_hidden.dim() > 1 else None
        if self._of_hidden is not None and unread:
            self._of_hidden.zero_()
        self._of_weight, self._part = of_weight, part
        self._sum = None
        if of_weight.dim() > 1:
            summed = sum_dtype(weight.dtype)
            self._sum = of_weight.zero_() if of_weight.dtype == summed else torch.zeros_like(weight, dtype=summed)

    def rows(self, rows: Any) -> Tensor:
        """Returns rows of the hidden states in the dtype of the products."""
        return self._hidden[rows].to(self.weight.dtype)

    def add(self, gradient: Tensor, hidden: Tensor, rows: Any) -> None:
        """Add a chunk's share of the gradients.

        Args:
            gradient: the gradient of the chunk's logits, in the dtype of the products.
        """
        if self._of_hidden is not None:
            self._of_hidden[rows] = (gradient @ self.weight).to(self._of_hidden.dtype)
        if self._sum is None:
            return
        if self._sum.dtype == gradient.dtype:
            self._sum.addmm_(gradient.t(), hidden)
            return
        for start in range(0, len(self._sum), self._part):
            columns, own = slice(start, start + self._part), self._sum[start : start + self._part]
            own += (gradient[:, columns].t() @ hidden)[: len(own)]

    def finish(self) -> None:
        """Round the sum of the weight's gradients to the result's dtype."""
        if self._sum is not None and self._sum is not self._of_weight:
            self._of_weight.copy_(self._sum)


def _padded(of_classes: Tensor, dtype: torch.dtype, padding: int) -> Tensor:
    """Converts a tensor with one row per class to a dtype, and appends rows of zeros."""
    if not padding:
        return of_classes.to(dtype)
    padded = of_classes.new_zeros((len(of_classes) + padding, *of_classes.shape[1:]), dtype=dtype)
    padded[: len(of_classes)] = of_classes
    return padded


def _logits(
    terms: Sequence[_Term], hidden: Sequence[Tensor], bias: Tensor | None, buffer: Tensor | None, is_fused: bool
) -> Tensor:
    """Computes the sum of the terms' products for `loss_and_gradient`, in the buffer if there is one."""
    out = None if buffer is None else buffer[: len(hidden[0])]
    weight = terms[0].weight.t()
    logits = torch.mm(hidden[0], weight, out=out) if bias is None else torch.addmm(bias, hidden[0], weight, out=out)
    for term, chunk in zip(terms[1:], hidden[1:], strict=True):
        logits.addmm_(chunk, term.weight.t())
    return logits if is_fused else logits.to(sum_dtype(logits.dtype))


def _empty_gradients(tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    def empty(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return cast(Tensor, tensors[0]).new_empty(0)
        return torch.empty(tensor.shape, dtype=gradient_dtype(tensor.dtype), device=tensor.device)

    return tuple(empty(tensor if is_needed else None) for tensor, is_needed in zip(tensors, needs, strict=True))


@chunked_loss.register_fake
def _(hidden: Tensor, *arguments: Any) -> Outputs:
    *_, loss_dtype, needs = arguments
    gradients = _empty_gradients((hidden, *arguments[: _DIFFERENTIABLE - 1]), needs)
    has_rows = hidden.new_empty((), dtype=torch.bool)
    return cast("Outputs", (hidden.new_empty((), dtype=loss_dtype), *gradients, has_rows))


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Not the loss, which a training loop may scale in place.
    ctx.save_for_backward(*output[1:])
    ctx.needs = inputs[-1]
    ctx.dtypes = [tensor if tensor is None else tensor.dtype for tensor in inputs[:_DIFFERENTIABLE]]
    ctx.undifferentiated = len(inputs) - _DIFFERENTIABLE


def _scale_gradients(ctx: Any, gradient: Tensor | None, *unused: Any) -> tuple[Any, ...]:
    *gradients, has_rows = ctx.saved_tensors
    if gradient is not None:
        # A sum without a label that is divided by the number of labels gets a gradient of infinity. PyTorch leaves
        # the zeros of rows that do not count alone.
        gradient = torch.where(has_rows, gradient, 0.0)
    scaled = [
        (saved * gradient).to(dtype) if is_needed and gradient is not None else None
        for saved, dtype, is_needed in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
    ]
    return (*scaled, *[None] * ctx.undifferentiated)


chunked_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)

# torch has no schema for an operator that may or may not return its argument; graph analysis treats it as a view.
_LIBRARY = torch.library.Library(LIBRARY, "FRAGMENT")
_LIBRARY.define("scaled(Tensor(a) gradient, Tensor factor) -> Tensor(a)")


@torch.library.impl(_LIBRARY, "scaled", "CompositeExplicitAutograd")
def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Returns `gradient * factor`, computed in place if no later backward needs `gradient`: the projection's gradient
    is as large as its weight, and would otherwise be held twice at the peak."""
    if not backward_runs_once():
        return gradient * factor
    # On other devices reading the factor would synchronize.
    is_one = factor.device.type == "cpu" and factor.item() == 1
    return gradient if is_one else gradient.mul_(factor)


# The operators as call targets in graphs.
CHUNKED_LOSS = getattr(torch.ops, LIBRARY).chunked_loss.default
LABELS_IGNORED = getattr(torch.ops, LIBRARY).labels_ignored.default
SCALED = getattr(torch.ops, LIBRARY).scaled.default


def scale_in_place(modules: Modules) -> None:
    """Rewrite the backward graph to scale gradients of the chunked loss in place. Only needed if it runs operator by
    operator, since inductor reuses its inputs."""
    forward, backward = modules
    saved = {node.name for node in forward.graph.nodes if is_loss_gradient(node)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in saved and len(node.users) == 1 and is_scaling(reader := next(iter(node.users)), node):
            reader.target = SCALED
    backward.recompile()
