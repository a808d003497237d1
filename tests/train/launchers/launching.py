"""Starts `worker.py` through a launcher as a user does, on the CPU, and reads its ranks' results."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests import fresh_process
from tests.train.launchers.worker import Job

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("worker.py")
PROGRAMS = Path(sys.executable).parent

# Many processes share this machine, so each computes with one thread; no process sees a GPU.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}

# Timeout in seconds: DeepSpeed may first build two operators, and the machine may be busy.
LONG = 1100

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
# DeepSpeed builds its operators at their first use.
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja", path=f"{PROGRAMS}:{os.environ.get('PATH', '')}") is None,
    reason="DeepSpeed's operators need c++ and ninja",
)


def launcher(name: str, *, zero: int | None = None, processes: int = 2) -> list[str]:
    """Returns the command of a launcher up to the script; `python` starts one process.

    Args:
        name: name of the launcher.
        zero: the ZeRO stage, which accelerate takes from its launcher and not from the script.
        processes: number of processes of torchrun.
    """
    if name == "python":
        return [sys.executable]
    kind = "--multi_gpu" if zero is None else f"--use_deepspeed --zero_stage {zero}"
    words = {
        "torchrun": f"--standalone --nproc_per_node {processes}",
        "deepspeed": f"--num_accelerators 2 --master_port {fresh_process.free_port()}",
        "accelerate": f"launch {kind} --num_processes 2 --main_process_port={fresh_process.free_port()}",
    }
    return [str(PROGRAMS / name), *words[name].split()]


def start(command: Sequence[Any], timeout: int = LONG, **environment: str) -> subprocess.CompletedProcess:
    """Run a command to its end, and capture stdout and stderr."""
    command = list(map(str, command))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT, **environment}, **pipes)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        # Timed out, here or by pytest's timeout: killing a launcher does not end its ranks.
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def alone() -> dict[str, str]:
    port = str(fresh_process.free_port())
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def write_jobs(folder: Path, jobs: Sequence[Job]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "jobs.json"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    return path


@dataclass(frozen=True)
class Done:
    """A launch that has ended."""

    folder: Path
    process: subprocess.CompletedProcess

    @property
    def output(self) -> str:
        return self.process.stdout + self.process.stderr

    def ranks(self, job: str) -> list[dict[str, Any]]:
        """Returns the results of a job by rank."""
        paths = sorted(self.folder.glob(f"{job}.[0-9].json"))
        assert paths, f"{job} left nothing:\n{self.output[-4000:]}"
        return [json.loads(path.read_text()) for path in paths]

    def trained(self, job: str) -> list[dict[str, Any]]:
        """Returns the results of a job by rank, and checks that it was not refused."""
        ranks = self.ranks(job)
        assert not any("error" in each for each in ranks), ranks
        return ranks

    def weights(self, job: str) -> Mapping[str, torch.Tensor]:
        return load_file(self.folder / f"{job}.0.safetensors")


def run_jobs(command: Sequence[str], folder: Path, jobs: Sequence[Job], **environment: str) -> Done:
    """Run the jobs in the processes that `command` starts; a crashed launch fails the test."""
    return _checked(Done(folder, start([*command, WORKER, write_jobs(folder, jobs)], **environment)))


def run_jobs_alone(folder: Path, jobs: Sequence[Job]) -> Done:
    environment = {**os.environ, **ENVIRONMENT}
    done = fresh_process.run(WORKER, write_jobs(folder, jobs), environment=environment, timeout=LONG)
    return _checked(Done(folder, done))


_TWO_RANKS = """
import sys
from tests.fresh_process import fork_ranks
from tests.train.launchers import worker

fork_ranks(2, timeout=int(sys.argv[1]))
sys.argv = ["worker.py", sys.argv[2]]
worker.main()
"""


def run_jobs_on_two_ranks(folder: Path, jobs: Sequence[Job], **environment: str) -> Done:
    """Run the jobs on two ranks without a launcher, in two thirds of the time since imports run once."""
    path, variables = write_jobs(folder, jobs), {**os.environ, **ENVIRONMENT, **environment}
    done = fresh_process.run("-c", _TWO_RANKS, LONG, path, environment=variables, timeout=LONG)
    return _checked(Done(folder, done))


def _checked(done: Done) -> Done:
    assert done.process.returncode == 0 or "error: " in done.output, done.output[-4000:]
    return done
