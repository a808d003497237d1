"""Operators that a compiler inlines into the kernels that read them, so that their results are never stored."""

from collections.abc import Callable

import torch

from optimum_memopt.engines.compile.costs.inlining import inlined
from optimum_memopt.engines.compile.graph.saved_activations import operator_name
from tests.captured import capture

ROWS, INNER, OUTER = 32, 64, 128


def held_for(step: Callable[..., torch.Tensor], *given: torch.Tensor) -> dict[str, str]:
    """Returns the inlined operators of the forward, each with the operator whose storage is held for it."""
    joint = (captured := capture(step, *given)).joint
    found = inlined(joint, captured.sizes, {activation.root for activation in captured.activations})
    own = [node for node in joint.forward if node.name in found.operands]
    return {operator_name(node): operator_name(held) if (held := found.root(node)) else "" for node in own}


def frozen(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns inputs of which only the last requires a gradient, so that nothing is saved for the others."""
    return [torch.ones(shape, requires_grad=index == len(shapes) - 1) for index, shape in enumerate(shapes)]


def test_a_chain_before_a_product_is_held_as_its_first_operand_alone() -> None:
    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = x @ up
        return ((hidden * 2).exp().sin() @ down).sum()

    found = held_for(step, *frozen((ROWS, INNER), (INNER, OUTER), (OUTER, INNER)))
    # The product reads the output of the chain's last operator.
    assert found == {"mul": "mm", "exp": "mm"}


def test_what_two_large_operands_are_read_for_is_held() -> None:
    def step(x: torch.Tensor, y: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        one, other = x @ up, y @ up
        return (((one * other).exp() + one.sum(0)) @ down).sum()

    found = held_for(step, *frozen((ROWS, INNER), (ROWS, INNER), (INNER, OUTER), (OUTER, INNER)))
    assert found == {"exp": "mul"}


def test_what_is_smaller_than_its_operand_is_held() -> None:
    """Inlining would keep the larger operand alive instead."""

    def step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = x.double() @ up.double()
        return ((hidden.float() + 1) @ down).sum()

    assert "_to_copy" not in held_for(step, *frozen((ROWS, INNER), (INNER, OUTER), (OUTER, INNER)))


def test_what_a_plan_may_save_and_what_is_returned_is_held() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x @ weight
        shifted = hidden + 1
        return shifted, shifted.exp().sum()

    # The backward reads the exponential, and the caller reads its operand.
    assert held_for(step, *frozen((ROWS, INNER), (INNER, OUTER))) == {}
