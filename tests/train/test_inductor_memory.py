"""What running inductor's programs without data has to answer. `test_inductor.py` compares what they hold."""

import torch

from optimum_memopt.engines.compile.memory.inductor_programs import _StorageTracker
from optimum_memopt.engines.compile.torch_compat import dynamo


def test_a_scalar_that_a_kernel_is_given_is_some_number() -> None:
    """On CUDA a program reads DeBERTa's scale so, which fake tensors refuse."""
    with dynamo.fake_tensors(), _StorageTracker(torch.device("cpu")) as tracker:
        assert torch.empty(()).item() == 1.0
        assert torch.empty((), dtype=torch.int64).item() == 1
    sizes: dict[object, int] = {}
    for key, size in tracker.log:
        sizes[key] = size
    assert not any(sizes.values())
