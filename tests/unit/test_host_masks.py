"""Attention masks are checked on the host. The `meta` device has no values: reading there raises."""

from collections.abc import Iterator

import pytest
import torch
from accelerate import data_loader

from optimum_memopt.engines.torch_compat import host_masks

META = torch.device("meta")


@pytest.fixture
def _watched() -> Iterator[None]:
    host_masks.watch_masks()
    yield
    host_masks.leave_masks()


def moved(mask: torch.Tensor, name: str = "attention_mask") -> torch.Tensor:
    return data_loader.send_to_device({name: mask}, META)[name]


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.usefixtures("_watched")
def test_a_mask_is_known_on_the_device(padding: int) -> None:
    mask = torch.ones(2, 4, dtype=torch.long)
    mask[0, 4 - padding :] = 0
    assert host_masks.is_true(moved(mask)) == (padding == 0)


@pytest.mark.usefixtures("_watched")
def test_a_mask_that_has_changed_since_is_read() -> None:
    mask = moved(torch.ones(2, 4, dtype=torch.long))
    mask[0, 3:] = 0
    with pytest.raises(RuntimeError, match="meta"):
        host_masks.is_true(mask)


@pytest.mark.usefixtures("_watched")
def test_other_inputs_are_left_alone() -> None:
    assert not hasattr(moved(torch.ones(2, 4), "pixel_values"), host_masks._KNOWN)


@pytest.mark.usefixtures("_watched")
def test_batches_are_moved_in_inference_mode() -> None:
    with torch.inference_mode():
        mask = moved(torch.ones(2, 4, dtype=torch.long))
    assert mask.is_inference() and not hasattr(mask, host_masks._KNOWN)


def test_the_function_of_accelerate_is_restored() -> None:
    stock = data_loader.send_to_device
    host_masks.watch_masks()
    host_masks.watch_masks()
    assert data_loader.send_to_device is not stock
    host_masks.leave_masks()
    assert data_loader.send_to_device is not stock
    host_masks.leave_masks()
    assert data_loader.send_to_device is stock


def test_a_function_around_it_stays() -> None:
    stock = data_loader.send_to_device
    host_masks.watch_masks()
    ours = data_loader.send_to_device
    data_loader.send_to_device = lambda *args, **kwargs: ours(*args, **kwargs)
    host_masks.leave_masks()
    assert data_loader.send_to_device is not ours
    assert not hasattr(moved(torch.ones(2, 4)), host_masks._KNOWN)
    # Restore the function from before the test.
    data_loader.send_to_device = stock
