"""What all tests share."""

import os
import tempfile

import pytest
from hypothesis import settings

# Tests start where a newcomer does, without the built torch extensions; name a cache with them to test with them.
os.environ.setdefault("OPTIMUM_MEMOPT_CACHE", os.path.join(tempfile.gettempdir(), "optimum_memopt-no-extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A machine that does other work as well makes any example slow now and then.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
