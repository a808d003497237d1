"""Bytes that kernels move if a compiler fuses neighbouring operators."""

from collections import Counter
from collections.abc import Callable

import torch

from optimum_memopt.engines.compile.costs.fusion import moved_by
from optimum_memopt.engines.compile.costs.graph_work import works
from optimum_memopt.engines.compile.graph.saved_activations import operator_name
from tests.captured import capture

ROWS, INNER, OUTER = 32, 64, 128
# Bytes of an activation, and of its product with a weight.
NARROW, WIDE = ROWS * INNER * 4, ROWS * OUTER * 4


def moved(step: Callable[..., torch.Tensor], *given: torch.Tensor, in_backward: bool = False) -> list[tuple[str, int]]:
    """Returns the operators of the forward or backward that move bytes, and how many; products are left out."""
    captured = capture(step, *given)
    of_nodes = zip(captured.joint.nodes, works(captured.joint, captured.sizes, moved_by(captured.joint)), strict=True)
    return [
        (operator_name(node), int(work.bytes))
        for node, work in of_nodes
        if work is not None and not work.flops and work.bytes and (node in captured.joint.backward) == in_backward
    ]


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.ones(shape, requires_grad=True) for shape in shapes]


def test_a_chain_between_two_products_reads_and_writes_once() -> None:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = x @ up
        return ((hidden.sigmoid() * hidden + 1).exp() @ down).sum()

    forward = moved(step, *tensors((ROWS, INNER), (INNER, OUTER), (OUTER, INNER)))
    # The sum reads the second product; its own result is a scalar.
    assert forward == [("sigmoid", WIDE), ("exp", WIDE), ("sum", NARROW + 4)]


def test_what_runs_behind_a_product_is_another_kernel() -> None:
    """A residual is written for the product, and read again by the addition after it."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        residual = x.sin()
        return (residual + residual @ weight).cos().amax(-1).sum()

    forward = moved(step, *tensors((ROWS, INNER), (INNER, INNER)))
    # The sum of a few numbers reads its operand again, like all sums over more than the last dimensions.
    assert forward[:2] == [("sin", 2 * NARROW), ("add", 2 * NARROW)]
    assert "cos" not in dict(forward)


def test_a_row_is_summed_in_the_kernel_that_reads_it_and_a_column_is_not() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, dim: int) -> torch.Tensor:
        hidden = (x @ weight).exp()
        return (hidden * hidden.sum(dim, keepdim=True)).cos().square().mean()

    given = tensors((ROWS, INNER), (INNER, OUTER))
    rows, columns = (Counter(name for name, _ in moved(lambda x, w, d=dim: step(x, w, d), *given)) for dim in (-1, 0))
    assert not rows["sum"]
    assert columns["sum"] == 1


def test_a_backward_reads_what_the_forward_has_written_and_computes_the_rest_again() -> None:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return ((x @ up).sigmoid().square() @ down).sum()

    backward = moved(step, *tensors((ROWS, INNER), (INNER, OUTER), (OUTER, INNER)), in_backward=True)
    # The gradient from the second product's backward; neither the sigmoid nor its square is read.
    assert sum(size for _, size in backward if size >= WIDE) == 2 * WIDE
