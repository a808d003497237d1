"""Two ranks in a loop of their own, sharded in ways that a Trainer's arguments do not name."""

import json

import pytest

from tests import fresh_process
from tests.train.launchers.sharded_loops import CASES

SCRIPT = fresh_process.ROOT + "/tests/train/launchers/sharded_loops.py"
TENSOR_PARALLEL = "tensor parallelism with the compile engine: a layer computes with a share of its parameters"


@pytest.mark.nightly
def test_weights_are_those_without_an_engine() -> None:
    done = fresh_process.run(SCRIPT, *CASES, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    found = {line.pop("case"): line for line in lines}
    assert found.keys() == CASES.keys(), done.stderr[-4000:]
    assert found.pop("tensor_parallel")["error"].startswith(TENSOR_PARALLEL)
    for case, result in found.items():
        assert result["differing"] == [], case
        assert "level 1, in 3 graphs for 3 layers, compiled once for equal ones, FSDP2" in result["header"][0], case
        assert "not exact" not in result["header"][1], case
