import mmap

import pytest
import torch

from optimum_memopt.engines.compile.partition.host_copies import PinnedPool
from optimum_memopt.engines.simulator.allocator import pinned_bytes

PAGE = mmap.PAGESIZE


class Host:
    """A pool with a fake host that records pinned ranges.

    Attributes:
        finished: number of times that the pool waited for the copies.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.finished = 0
        self.pool = PinnedPool(self.pinned.__setitem__, self._unpin, self._finish)

    def _unpin(self, address: int) -> None:
        assert self.finished, "copies may be under way"
        del self.pinned[address]

    def _finish(self) -> None:
        self.finished += 1

    def step(self, sizes: list[int]) -> list[int]:
        """Returns the addresses of tensors that are alive at the same time."""
        tensors = [self.pool.take(size) for size in sizes]
        assert [tensor.nbytes for tensor in tensors] == sizes
        return [tensor.data_ptr() for tensor in tensors]


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_tensor_takes_its_pages(host):
    size = 48 * 2**20
    tensor = host.pool.take(size)
    assert host.pinned == {tensor.data_ptr(): size} and host.pool.bytes == size == pinned_bytes(size)
    small = host.pool.take(PAGE + 1)
    assert host.pinned[small.data_ptr()] == 2 * PAGE == pinned_bytes(PAGE + 1)


def test_the_next_step_has_the_same_memory(host):
    sizes = [5 * PAGE, PAGE, 3 * PAGE]
    assert host.step(sizes) == host.step(sizes) and len(host.pinned) == 3
    # Two forwards before their backwards have separate memory.
    first = [host.pool.take(size) for size in sizes]
    second = [host.pool.take(size) for size in sizes]
    assert len({tensor.data_ptr() for tensor in first + second}) == 6 == len(host.pinned)


def test_memory_is_another_tensors_only_when_all_with_its_storage_are_gone(host):
    tensor = host.pool.take(4 * PAGE)
    view = tensor.view(torch.float32).as_strided((8, 8), (16, 1))
    address = tensor.data_ptr()
    del tensor
    assert host.pool.take(PAGE).data_ptr() != address
    storage = view.untyped_storage()
    del view
    assert host.pool.take(PAGE).data_ptr() != address
    del storage
    assert host.pool.take(4 * PAGE).data_ptr() == address


def test_what_autograd_saves_stays(host):
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(host.pool.take(PAGE).fill_(7))
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0][0]

    x = torch.ones(1, requires_grad=True)
    y = Saves.apply(x)
    host.pool.take(PAGE).fill_(9)
    y.backward()
    assert x.grad.item() == 7
    assert host.pool.bytes == 2 * PAGE


@pytest.mark.parametrize("scale", [1.0, 0.9, 0.45, 0.2])
def test_a_smaller_batch_takes_nothing_more(host, scale):
    sizes = [40 * PAGE, 80 * PAGE] * 3 + [10 * PAGE] * 4
    host.step(sizes)
    host.step([int(size * scale) for size in sizes])
    host.step(sizes)
    assert host.pool.bytes == sum(sizes) and not host.finished


def test_a_larger_batch_takes_the_place_of_the_smaller_one(host):
    for scale in (10, 11, 30):
        sizes = [4 * scale * PAGE, 8 * scale * PAGE, scale * PAGE]
        host.step(sizes)
        assert host.pool.bytes == sum(host.pinned.values()) == sum(sizes)


def test_a_released_pool_keeps_what_is_read(host):
    tensor, other = host.pool.take(2 * PAGE).fill_(3), host.pool.take(PAGE)
    del other
    host.pool.release()
    assert host.pinned == {tensor.data_ptr(): 2 * PAGE} and tensor.eq(3).all()
    del tensor
    host.pool.release()
    assert not host.pinned and not host.pool.bytes
    assert host.pool.take(PAGE).nbytes == PAGE
