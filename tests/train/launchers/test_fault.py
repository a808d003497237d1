"""A rank is killed in the middle of an epoch: the other one ends soon and says why, and the run resumes from its
checkpoint with the same result as an uninterrupted run."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from tests import fresh_process
from tests.rotation import in_turn
from tests.train.launchers import launching
from tests.train.launchers.sharded_jobs import DEPTH
from tests.train.launchers.test_fsdp import fsdp
from tests.train.launchers.worker import Job
from tests.trainer_runs import distance

SAVED, KILLED, STEPS = 3, 5, 8
# An epoch has ten steps.
ROWS = 80
STEPPED = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
ARGUMENTS = {"memory_opt_config": "Gelu+:1:-1", **STEPPED}
TRAINED = Job("steps", rows=ROWS, arguments=ARGUMENTS)
DYING = replace(TRAINED, name="dying", killed=(1, KILLED))
SHARDED = {**fsdp("llama", state_dict_type="SHARDED_STATE_DICT"), "memory_opt_level": 1, **STEPPED}
KINDS = {
    "ddp": TRAINED,
    "fsdp2": replace(TRAINED, engine="compile", model="llama", arguments=SHARDED, config={"num_hidden_layers": DEPTH}),
}
SOON = 240
# Seconds until the checkpoint, and from there until the end.
BY_THEMSELVES = 400 + SOON


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Run one job of each kind without interruption."""
    jobs = [replace(job, name=kind) for kind, job in KINDS.items()]
    return launching.run_jobs(launching.launcher("torchrun"), tmp_path_factory.mktemp("uninterrupted"), jobs)


def wait_for_checkpoint(folder, seconds=400):
    """Wait until the checkpoint is complete, shortly before the rank is killed, and return the time."""
    end = time.monotonic() + seconds
    while not (folder / f"checkpoint-{SAVED}" / "trainer_state.json").exists():
        assert time.monotonic() < end, "no checkpoint"
        time.sleep(0.1)
    return time.monotonic()


def resumed(folder, kind, uninterrupted):
    """Resume the run, and return the distance of its weights from those of the uninterrupted run."""
    checkpoints = {path.name for path in (folder / "dying-output").glob("checkpoint-*")}
    assert checkpoints == {f"checkpoint-{SAVED}"}
    checkpoint = str(folder / "dying-output" / f"checkpoint-{SAVED}")
    job = replace(KINDS[kind], name="on", resume=checkpoint)
    done = launching.run_jobs(launching.launcher("torchrun"), folder / "on", [job])
    ranks = done.trained("on")
    assert [rank["steps"] for rank in ranks] == [STEPS, STEPS] and ranks[0]["digest"] == ranks[1]["digest"]
    return distance(done.weights("on"), uninterrupted.weights(kind))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_under_torchrun(tmp_path, uninterrupted, kind):
    dying = replace(KINDS[kind], name="dying", killed=DYING.killed)
    command = [*launching.launcher("torchrun"), launching.WORKER, launching.write_jobs(tmp_path, [dying])]
    process = start_process(command, tmp_path / "log")
    try:
        saved = wait_for_checkpoint(tmp_path / "dying-output")
        assert process.wait(SOON) == 1
        assert time.monotonic() - saved < SOON
    finally:
        end(process)
    log = (tmp_path / "log").read_text()
    assert "Signal 9 (SIGKILL) received by PID" in log and "rank      : 1" in log
    assert not list(tmp_path.glob("dying.*.json"))
    assert resumed(tmp_path, kind, uninterrupted) < 1e-5


BY_HAND = """
import sys
from tests.fresh_process import fork_ranks
from tests.train.launchers import worker
fork_ranks(2, timeout={seconds}, end_together=False)
sys.argv = ["worker.py", {path!r}]
worker.main()
"""
ZERO = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}


@in_turn
@pytest.mark.parametrize(
    "deepspeed",
    [None, pytest.param(ZERO, marks=[pytest.mark.nightly, launching.needs_deepspeed, launching.needs_compiler])],
    ids=["ddp", "zero_1"],
)
def test_without_an_agent(tmp_path, deepspeed):
    """Without an elastic agent, the remaining process ends by itself."""
    path = launching.write_jobs(tmp_path, [replace(DYING, arguments={**ARGUMENTS, "deepspeed": deepspeed})])
    environment = {**os.environ, **launching.ENVIRONMENT}
    script = BY_HAND.format(path=str(path), seconds=BY_THEMSELVES)
    done = fresh_process.run("-c", script, environment=environment, timeout=BY_THEMSELVES + SOON)
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert second == -signal.SIGKILL
    assert first not in (0, -signal.SIGALRM), "it was ended after its time"
    assert (tmp_path / "dying-output" / f"checkpoint-{SAVED}" / "trainer_state.json").exists()
    assert re.search("Connection (closed|reset) by peer", done.stderr), done.stderr[-2000:]


def start_process(command, log, **environment):
    with log.open("w") as output:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **launching.ENVIRONMENT, **environment},
        )


def end(process):
    if process.poll() is None:
        process.kill()
        process.wait()
