"""What running inductor's programs without data has to answer. `test_inductor.py` compares what they hold."""

import torch

from optimum_memopt.engines.compile.memory.inductor_memory import _StorageTracker
from optimum_memopt.engines.compile.torch_compat import dynamo


def test_a_scalar_that_a_kernel_is_given_is_some_number() -> None:
    """On CUDA a program reads DeBERTa's scale so, which fake tensors refuse."""
    with dynamo.fake_tensors(), _StorageTracker(torch.device("cpu"), 0) as tracker:
        assert torch.empty(()).item() == 1.0
        assert torch.empty((), dtype=torch.int64).item() == 1
    assert tracker.held == 0
