"""`make test-cuda` runs this folder with the CUDA build of torch, on the stand-in or on a GPU; else it is left out."""

import gc

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _attention_without_cudnn():
    """cuDNN asks the device for more than the stand-in knows."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture(autouse=True)
def _dynamo_forgets():
    """No test starts with the graphs, and the memory, of the one before."""
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
