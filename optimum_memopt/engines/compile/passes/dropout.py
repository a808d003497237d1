"""Dropout whose mask is a function of a seed, so that a plan may recompute the mask instead of saving it.

aten's `native_dropout` draws from the global generator: recomputed in the backward it would be another mask. Here the
forward draws one seed for each dropout, which is saved (8 bytes), and the mask is a pure function of it.
"""

from collections.abc import Callable

import torch

from optimum_memopt.engines.compile.operators import LIBRARY


@torch.library.custom_op(f"{LIBRARY}::keep_mask", mutates_args=())
def keep_mask(size: list[int], seed: torch.Tensor, keep: float, device: torch.device) -> torch.Tensor:
    """A mask of `size` on `device`, each element True with probability `keep`, the same for the same `seed`.

    Args:
        size: shape of the mask.
        seed: int64, one element, on the CPU: reading it must not wait for a GPU.
        keep: probability of True.
        device: of the mask.
    """
    if device.type == "meta":
        return torch.empty(size, dtype=torch.bool, device=device)
    generator = torch.Generator(device).manual_seed(int(seed))
    return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(keep, generator=generator)


@keep_mask.register_fake
def _(size: list[int], seed: torch.Tensor, keep: float, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bool, device=device)


@torch.library.custom_op(f"{LIBRARY}::drop", mutates_args=())
def drop(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """`x * scale` where the mask is True, else 0.

    One operator: a product of `x` and a mask casts the mask on the CPU, which takes as much memory as `x`, and time.
    """
    return torch.where(mask, x, x.new_zeros(()), out=torch.empty_like(x)).mul_(scale)


@drop.register_fake
def _(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def seeded_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """aten::native_dropout by a seed."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device="cpu")
    mask = keep_mask(list(x.shape), seed, 1 - p, x.device)
    return drop(x, mask, 1 / (1 - p)), mask


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """For AOTAutograd where no compiler brings its own functional random numbers."""
    return {
        torch.ops.aten.native_dropout.default: seeded_dropout,
        # Its own kernel on the CPU holds a scaled mask that no graph shows.
        torch.ops.aten.native_dropout_backward.default: drop,
    }
