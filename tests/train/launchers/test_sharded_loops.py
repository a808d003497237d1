"""Custom loops on two ranks, sharded in ways that a Trainer's arguments cannot express."""

import json

import pytest

from tests import fresh_process
from tests.train.launchers.sharded_loops import CASES
from tests.trainer_runs import CLOSE

SCRIPT = fresh_process.ROOT + "/tests/train/launchers/sharded_loops.py"
OTHER_PLAN = (
    "rank 1 trains with a different setup than rank 0: --memory_opt_budget: None on rank 0, 90% on rank 1; "
    "--memory_opt_level: 1 on rank 0, 0 on rank 1"
)
TENSOR_PARALLEL = (
    "the compile engine does not support tensor parallelism: a layer computes with a shard of its parameters"
)


@pytest.mark.nightly
def test_weights_are_those_without_an_engine() -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    done = fresh_process.run(SCRIPT, *CASES, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    found = {line.pop("case"): line for line in lines}
    assert found.keys() == CASES.keys(), done.stderr[-4000:]
    assert found.pop("tensor_parallel")["error"].startswith(TENSOR_PARALLEL)
    assert found.pop("other_plan")["error"] == OTHER_PLAN
    # Image features are merged into the text outside all graphs.
    images = found.pop("images")
    assert images["distance"] == 0.0 and "for 4 layers, equal layers share one, FSDP2" in images["header"][0]
    for masks in (found.pop("padding"), found.pop("window")):
        assert masks["distance"] < CLOSE and "fits without a plan" in masks["header"][0]
    for case, result in found.items():
        assert result["distance"] == 0.0, case
        assert "level 1, in 3 graphs for 3 layers, equal layers share one, FSDP2" in result["header"][0], case
        assert "not exact" not in result["header"][1], case
