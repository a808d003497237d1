"""Dropout with a mask that a plan may recompute, and, on a CPU, with the same draws as plain PyTorch.

aten's `native_dropout` draws from the global generator: recomputing it in the backward would give another mask. Here
the forward records the generator's state before each draw (5 KB on a CPU, 16 bytes on CUDA), and the mask is a pure
function of it. On a CPU the loss, the gradients and the generator's state afterwards match plain PyTorch bit for bit.
On CUDA, where PyTorch's own dropout draws and multiplies in one kernel, masks differ at the same seed.
"""

import operator
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import fx

from optimum_memopt.engines.compile.graph.joint import first_input
from optimum_memopt.engines.torch_compat import fx_graph
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.torch_compat.kernels import generator_state

# Bytes of a generator's state; a CUDA generator's state is its seed and its offset
# (`aten/src/ATen/cuda/CUDAGeneratorImpl.cpp`, 2.13).
_CPU_STATE, _CUDA_STATE = torch.get_rng_state().numel(), 16


def _empty_mask(size: Sequence[int], order: Sequence[int], device: torch.device) -> torch.Tensor:
    laid_out = torch.empty([size[dim] for dim in order], dtype=torch.bool, device=device)
    return laid_out.permute([order.index(dim) for dim in range(len(order))])


@torch.library.custom_op(f"{LIBRARY}::draw_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def draw_mask(
    token: torch.Tensor, size: Sequence[int], order: Sequence[int], keep: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state of the default generator, and the mask that it draws from there; see `keep_mask`.

    Args:
        token: a separate `torch.empty` for each draw: torch merges two draws with equal arguments, but never two
            `torch.empty` (`fx_graph_cse` in `torch/_functorch/compile_utils.py`, 2.13).
        order: the mask's dimensions from the outermost in memory to the innermost, in which generators draw.
    """
    state = generator_state(device)
    return state, _empty_mask(size, order, device).bernoulli_(keep)


@draw_mask.register_fake
def _(
    token: torch.Tensor, size: Sequence[int], order: Sequence[int], keep: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.empty(_CPU_STATE if device.type == "cpu" else _CUDA_STATE, dtype=torch.uint8, device="cpu")
    return state, _empty_mask(size, order, device)


@torch.library.custom_op(f"{LIBRARY}::keep_mask", mutates_args=())
def keep_mask(
    size: Sequence[int], order: Sequence[int], state: torch.Tensor, keep: float, device: torch.device
) -> torch.Tensor:
    """Returns the mask that `draw_mask` has drawn; each element is True with probability `keep`.

    Args:
        order: the order of its dimensions, see `draw_mask`.
        state: the generator's state before the draw; on the CPU, so that reading it does not wait for a GPU.
    """
    mask = _empty_mask(size, order, device)
    if device.type == "meta":
        return mask
    generator = torch.Generator(device)
    generator.set_state(state)
    return mask.bernoulli_(keep, generator=generator)


@keep_mask.register_fake
def _(
    size: Sequence[int], order: Sequence[int], state: torch.Tensor, keep: float, device: torch.device
) -> torch.Tensor:
    return _empty_mask(size, order, device)


@torch.library.custom_op(f"{LIBRARY}::drop", mutates_args=())
def drop(x: torch.Tensor, mask: torch.Tensor, keep: float) -> torch.Tensor:
    """Returns `x / keep` where the mask is True, else 0, rounded as in `torch.nn.functional.dropout`.

    On a CPU, PyTorch divides a mask of `x`'s dtype by `keep` and multiplies by it (`aten/src/ATen/native/Dropout.cpp`,
    2.13). Here the same products are computed in the result's memory: a mask in `x`'s dtype would take as much again.
    """
    if x.device.type != "cpu":
        return torch.where(mask, x, x.new_zeros(()), out=torch.empty_like(x)).mul_(1 / keep)
    scale = x.new_ones(()).div_(keep)
    return torch.where(mask, scale, torch.zeros_like(scale), out=torch.empty_like(x)).mul_(x)


@drop.register_fake
def _(x: torch.Tensor, mask: torch.Tensor, keep: float) -> torch.Tensor:
    return torch.empty_like(x)


def pure_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes aten::native_dropout with a mask that is a function of the generator's state."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return x * x.new_zeros(()), torch.zeros_like(x, dtype=torch.bool)
    size, order = list(x.shape), fx_graph.memory_order(x)
    state, _ = draw_mask(torch.empty(0, device="cpu"), size, order, 1 - p, x.device)
    mask = keep_mask(size, order, state, 1 - p, x.device)
    return drop(x, mask, 1 - p), mask


def pure_dropout_backward(gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Computes aten::native_dropout_backward with the rounding of `drop`; `scale` is 1 / keep, or 0 if keep is 0."""
    return drop(gradient, mask, 1 / scale) if scale else gradient * gradient.new_zeros(())


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """Returns decompositions for AOTAutograd without a compiler that has its own functional random numbers."""
    return {
        torch.ops.aten.native_dropout.default: pure_dropout,
        # aten's CPU kernel holds a scaled mask that is not in the graph.
        torch.ops.aten.native_dropout_backward.default: pure_dropout_backward,
    }


def take_drawn_masks(forward: fx.GraphModule) -> None:
    """Make a partitioned forward read the masks that it has drawn, instead of recomputing each from its state. Names
    of nodes stay."""
    for node in forward.graph.find_nodes(op="call_function", target=torch.ops.optimum_memopt.keep_mask.default):
        state = cast(fx.Node, node.args[2])
        node.target, node.args = operator.getitem, (first_input(state), 1)
    forward.graph.lint()
    forward.recompile()
