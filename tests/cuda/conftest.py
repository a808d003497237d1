"""`make test-cuda` runs this folder with torch's CUDA build, on the stand-in or a GPU; it is skipped otherwise."""

import gc

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _attention_without_cudnn():
    """Disable cuDNN attention, which requires more of the device than the stand-in provides."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture(autouse=True)
def _dynamo_forgets():
    """Reset dynamo, so that no test starts with the graphs and memory of the previous one."""
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
