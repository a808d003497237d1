"""Runs scripts in processes forked from one that has imported torch and transformers; saves 7 seconds each.

The forked processes have not imported this package, ONNX Runtime or DeepSpeed. Tests of imports of torch and
transformers, of malloc from the start, or of process startup need a real process: `subprocess.run`.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1])
# The same path as pytest uses (`pythonpath` in pyproject.toml).
BENCHMARKS = os.path.join(ROOT, "benchmarks")
# Most of what a Trainer needs.
IMPORTED = ("torch._inductor.compile_fx", "transformers.trainer")


def run(
    *arguments: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: int = 300
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; the process can import the tests, and its output is captured as text.

    Args:
        arguments: a script with its own arguments, or `-c` and the code.
        environment: environment of the process, by default this one's; imported libraries have already read theirs.
        timeout: seconds after which the process is killed; its exit code is then -14.
    """
    command = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        request = {
            "arguments": command,
            "environment": dict(os.environ if environment is None else environment),
            "cwd": os.fspath(cwd or os.getcwd()),
            "outputs": paths,
            "timeout": timeout,
        }
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        stdout, stderr = (Path(path).read_text(errors="replace") for path in paths)
    return subprocess.CompletedProcess([sys.executable, *command], code, stdout, stderr)


def free_port() -> int:
    """Returns a free port of this machine, for the store of a process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork_ranks(count: int, timeout: int = 300, end_together: bool = True) -> None:
    """Fork into `count` ranks of a process group, and continue in each; the calling process exits after all of them.

    Args:
        count: number of ranks, all on this machine.
        timeout: seconds after which a rank is killed.
        end_together: whether to kill the other ranks when one fails, as a launcher does; if False, print the
            exit codes of all ranks once they have ended.
    """
    port, ranks = str(free_port()), []
    for rank in map(str, range(count)):
        child = os.fork()
        if child == 0:
            signal.alarm(timeout)
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count)}
            os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            return
        ranks.append(child)
    codes: dict[int, int] = {}
    while len(codes) < count:
        ended, status = os.wait()
        codes[ended] = os.waitstatus_to_exitcode(status)
        if codes[ended] and end_together:
            # The others would wait for the failed rank.
            for child in set(ranks).difference(codes):
                os.kill(child, signal.SIGKILL)
    if not end_together:
        print(json.dumps([codes[child] for child in ranks]), flush=True)
    os._exit(any(codes.values()))


@functools.cache
def _server() -> Any:
    """Returns the server process, one for all tests of a worker; it ends when its standard input closes."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=environment, **pipes)
    atexit.register(server.communicate)
    return server


def _serve() -> dict[str, Any] | None:
    """Answer requests with the exit codes of forked processes; in a forked process, returns its request."""
    # Children inherit neither the pipes nor the output that goes to them.
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    while line := requests.readline():
        child = os.fork()
        if child == 0:
            return json.loads(line)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, file=answers, flush=True)
    return None


def _become(request: dict[str, Any], own_path: list[str]) -> None:
    """Run the requested program as the main program.

    Args:
        own_path: Python's module search path without the script's folder and `PYTHONPATH`.
    """
    signal.alarm(request["timeout"])
    for target, path in enumerate(request["outputs"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), target)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = request["arguments"]
    path = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), ROOT, BENCHMARKS, *own_path]
    if sys.argv[0] != "-c":
        sys.path[:] = [os.path.dirname(os.path.abspath(sys.argv[0])), *path]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.path[:] = ["", *path]
    code = sys.argv.pop(1)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(code, vars(main))


if __name__ == "__main__":
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own_path = [entry for entry in sys.path[1:] if entry not in given]

    for name in IMPORTED:
        importlib.import_module(name)
    asked = _serve()
    if asked is not None:
        _become(asked, own_path)
