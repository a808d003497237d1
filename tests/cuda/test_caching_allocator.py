"""The simulated allocator against torch's, in processes with nothing else on the device."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("allocator_requests.py")


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_requests(seed: int) -> None:
    command = [sys.executable, SCRIPT, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "reserved" in done.stdout, done.stdout + done.stderr
