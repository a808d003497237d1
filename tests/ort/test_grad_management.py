"""`--ort_mem_efficient_grad_mgmt`: gradients and hooks as in plain PyTorch, on each rank, at a lower peak."""

import pytest

from optimum_memopt.engines.ort.compat import extensions
from tests.ort.helpers import needs_ort, run_script

pytestmark = [needs_ort, pytest.mark.extensions, pytest.mark.timeout(1800)]


def test_gradients_and_hooks_are_those_of_plain_pytorch(environment_with_extensions):
    run_script("grad_management_hooks.py", environment=environment_with_extensions)


def test_two_ranks_stay_bitwise_equal(environment_with_extensions, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    output = run_script(
        "grad_management_ranks.py", tmp_path / "out", environment=environment_with_extensions, launcher=launcher
    )
    assert "rank 0 is done" in output and "rank 1 is done" in output


def test_the_peak_is_lower_when_gradients_accumulate(environment_with_extensions):
    """128 MiB of parameters: without it a second set of gradients exists beside the first at the end of backward."""
    plain, managed = (
        float(run_script("grad_management_peak.py", case, environment=environment_with_extensions).split()[-1])
        for case in ("plain", "managed")
    )
    assert managed < plain - 64


def test_it_needs_the_extensions(tmp_path, monkeypatch):
    from optimum_memopt import MemOptError, MemOptOptions

    monkeypatch.setenv(extensions.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(MemOptError, match=f"build them with: {extensions.BUILD_COMMAND}"):
        MemOptOptions(ort_mem_efficient_grad_mgmt=True).check()
