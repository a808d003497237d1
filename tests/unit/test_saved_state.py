"""Saved state is compared by the numbers that it has in memory, and by no others."""

import pytest
import torch

from optimum_memopt.engines.compile.capture.moved_state import SavedState

MANY = 9000  # More numbers than are compared as a whole.


def changed(view: torch.Tensor, write: torch.Tensor) -> bool:
    """Returns whether a write to `write` after the forward is found when the backward reads `view`."""
    found: list[bool] = []
    state = SavedState.of(view, is_whole=False, opened=lambda has_changed, _: found.append(has_changed))
    write.add_(1.0)
    assert state.open() is state.tensor
    return found == [True]


def test_state_with_shared_memory() -> None:
    row = torch.rand(1, 3)
    assert changed(row.expand(MANY, 3), row)
    assert not changed(row.expand(MANY, 3), torch.rand(3))


@pytest.mark.parametrize("at", [0, 1])
def test_a_slice_of_other_state(at: int) -> None:
    base = torch.rand(MANY, 3)
    assert changed(base[:, 0], base[:, at]) is (at == 0)
