"""A chunk of the chunked loss: computes the cross entropy of some rows' logits, and overwrites them with its gradient.

On CUDA inductor compiles it into two kernels: one reads the logits and computes maximum and sum of each row, the other
one reads them again and overwrites them with the gradient. Liger Kernel's hand-written kernel does the same
(`ops/cross_entropy.py`, 0.8). On other devices torch's operators run one by one, in place.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from optimum_memopt.engines.torch_compat import dynamo, traced_sizes
from optimum_memopt.engines.torch_compat.kernels import ALIGNED, HALVES


@dataclass(frozen=True)
class CrossEntropy:
    """The cross entropy of logits that are scaled first.

    Attributes:
        classes: number of classes; further columns of the logits are ignored.
        softcap: not 0: the scaled logits become `softcap * tanh` of them.
        smoothing: label smoothing.
    """

    classes: int
    scale: float = 1.0
    softcap: float = 0.0
    smoothing: float = 0.0


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the softmax, the loss and the sums of the chunks' gradients: at least float32, to which
    transformers casts logits."""
    return torch.promote_types(dtype, torch.float32)


def is_fused(on_cuda: bool) -> bool:
    """True if inductor compiles the chunks of a loss. When planning for CUDA on a machine without it, Triton is
    assumed to be available."""
    return on_cuda and (not torch.cuda.is_available() or dynamo.inductor_works("cuda"))


def columns(classes: int, dtype: torch.dtype, is_fused: bool) -> int:
    """Returns the number of a chunk's columns: the classes, in half precision padded to a multiple of 8. Products with
    50,265 classes (RoBERTa) took five times as long on an H100 (torch 2.11); inductor pads them, too (`pad_mm`)."""
    return -(-classes // ALIGNED) * ALIGNED if is_fused and dtype in HALVES else classes


def loss_and_gradient(
    logits: Tensor, targets: Tensor, of: CrossEntropy, share: float, is_fused: bool
) -> tuple[Tensor, Tensor]:
    """Computes the loss of logits, and overwrites these with their gradient.

    Args:
        logits: (rows, `columns`) in the dtype of the product; in `sum_dtype` if it is not fused.
        targets: (rows,), classes.
        share: factor of the gradient.

    Returns:
        The sum of the rows' losses in `sum_dtype`, and the gradient of the unscaled logits times `share`, in
        the memory of the logits.
    """
    if not is_fused:
        return _by_operators(logits, targets, of, share)
    with dynamo.below_autograd(), torch.autocast(logits.device.type, enabled=False):
        # As tensors: a number would be compiled in, and differs between batches, as do the offsets of a batch's parts.
        factor = logits.new_full((), share, dtype=sum_dtype(logits.dtype))
        own = logits.view_as(logits)
        with traced_sizes.StaticSizes([(own, [1])]):
            return _compiled(of)(own, targets.clone(), factor), logits


@functools.cache
def _compiled(of: CrossEntropy) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns compiled kernels that compute the loss of logits, and overwrite these with their gradient."""

    def kernels(logits: Tensor, targets: Tensor, share: Tensor) -> Tensor:
        read = logits[:, : of.classes].to(share.dtype) * of.scale
        capped = read.tanh() if of.softcap else None
        read = read if capped is None else capped * of.softcap
        largest = read.amax(1, keepdim=True)
        exponents = (read - largest).exp()
        total = exponents.sum(1, keepdim=True)
        index = targets.unsqueeze(1)
        is_target = torch.arange(of.classes, device=logits.device) == index
        of_target = logits.gather(1, index).to(share.dtype) * of.scale
        of_target = of_target.tanh() * of.softcap if of.softcap else of_target
        mean = read.mean(1, keepdim=True) if of.smoothing else of_target
        losses = total.log() + largest - (1 - of.smoothing) * of_target - of.smoothing * mean
        gradient = exponents / total - of.smoothing / of.classes - torch.where(is_target, 1 - of.smoothing, 0.0)
        slope = 1.0 if capped is None else (1 - capped * capped) * of.softcap
        logits[:, : of.classes] = gradient * share * slope * of.scale
        return losses.sum()

    return dynamo.compiled_in_operator(kernels)


def _by_operators(logits: Tensor, targets: Tensor, of: CrossEntropy, share: float) -> tuple[Tensor, Tensor]:
    scale, softcap, smoothing = of.scale, of.softcap, of.smoothing
    capped = None
    if softcap:
        capped = logits.mul_(scale).tanh_()
        logits = capped * softcap
    elif scale != 1:
        logits.mul_(scale)
    index = targets.unsqueeze(1)
    logits.sub_(logits.amax(1, keepdim=True))
    of_target = logits.gather(1, index)
    mean = logits.mean(1, keepdim=True) if smoothing else of_target
    total = logits.exp_().sum(1, keepdim=True)
    loss = (total.log() - (1 - smoothing) * of_target - smoothing * mean).sum()
    gradient = logits.div_(total / share)
    gradient.scatter_(1, index, gradient.gather(1, index) - (1 - smoothing) * share)
    if smoothing:
        gradient.sub_(smoothing * share / gradient.shape[1])
    if capped is not None:
        gradient = capped.square_().neg_().add_(1).mul_(gradient).mul_(scale * softcap)
    elif scale != 1:
        gradient.mul_(scale)
    return loss, gradient
