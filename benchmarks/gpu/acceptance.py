"""Proves or breaks every CUDA path on one GPU, in three parts of at most 8 minutes each.

    python benchmarks/gpu/acceptance.py --part right
    python benchmarks/gpu/acceptance.py --part predicted --out results
    python benchmarks/gpu/acceptance.py --part worth --only "llama"
    python benchmarks/gpu/acceptance.py --report results --docs docs

Parts:

- `right`: kernels, buffers, gradients, dropout, offload under delayed copies, fp16.
- `predicted`: bytes and the budget against what torch's allocator says; how much of the copies is hidden.
- `worth`: samples a second at the largest batch under a cap of memory, against other ways to save it; Trainer and DDP.

From a checkout, with torch 2.9 or later, transformers 5, accelerate and tabulate; budgets need scipy too. Nothing is
downloaded. Prints a line for each figure as it comes, `PASS|FAIL|SKIP name figure limit`, and ends with 1 where one
failed. --out has the same as JSON and as a Markdown table. The checks run in a process of their own, and in a new one
after an error that costs the device.
"""

import argparse
import importlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import report
from gpu.checks import FAIL, SKIP, Check, Outcome, Setting, crash, heard, serve

PARTS = ("right", "predicted", "worth")
# After these the rest of a part is left out.
SECONDS = 480
_PATIENCE = 10


def checks_of(part: str) -> list[Check]:
    """In the order in which they run."""
    return list(importlib.import_module(f"gpu.{part}").CHECKS)


class Worker:
    """A process that runs checks.

    Args:
        arguments: of this program.
        names: of the checks.
    """

    def __init__(self, arguments: argparse.Namespace, names: Sequence[str]) -> None:
        command = [sys.executable, __file__, "--part", arguments.part, "--layers", str(arguments.layers)]
        command += ["--worker", *["--quick"] * arguments.quick]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(list(names)))
        stdin.close()
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_event(self, deadline: float) -> dict[str, Any] | None:
        """Its next event; None when it has ended.

        Raises:
            TimeoutError: nothing before the deadline.
        """
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            if (event := heard(line)) is not None:
                return event

    def end(self) -> int:
        """Kill it if it is still there; its exit status."""
        if self._process.poll() is None:
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def outcomes(
    checks: Sequence[Check], arguments: argparse.Namespace, note_conditions: Callable[[str], None]
) -> Iterator[Outcome]:
    """Yield the outcomes of all checks, in processes that are started anew after one that was lost.

    Args:
        checks: in this order.
        arguments: of this program.
        note_conditions: gets what the figures depend on beside the models.
    """
    deadline = time.monotonic() + arguments.seconds
    left = {check.name: check for check in checks}
    while left and time.monotonic() < deadline:
        worker = Worker(arguments, list(left))
        current, limit = None, deadline
        try:
            while (event := worker.next_event(min(limit, deadline))) is not None:
                if "conditions" in event:
                    note_conditions(event["conditions"])
                elif "begin" in event:
                    current = event["begin"]
                    limit = time.monotonic() + _allowed(left[current], arguments)
                elif "outcome" in event:
                    yield Outcome(**event["outcome"])
                else:
                    del left[event["end"]]
                    current, limit = None, deadline
        except TimeoutError:
            worker.kill()
            if time.monotonic() < deadline and current is not None:
                yield crash(current, f"ran past its {_allowed(left.pop(current), arguments)} s")
            continue
        status = worker.end()
        if current is not None:
            del left[current]
            yield crash(current, f"the process ended with {status}")
        elif status not in (0, 3):
            # It has not come as far as a check, and would not the next time.
            for name in left:
                yield crash(name, f"the process ended with {status} before its first check")
            return
    for name in left:
        yield Outcome(name, SKIP, "", f"the part has used its {arguments.seconds} s")


def _allowed(check: Check, arguments: argparse.Namespace) -> int:
    """Seconds of a check; --quick is for machines without a GPU and with few cores."""
    return check.seconds * (_PATIENCE if arguments.quick else 1)


def chosen(arguments: argparse.Namespace) -> list[Check]:
    wanted = re.compile(arguments.only)
    return [check for check in checks_of(arguments.part) if wanted.search(check.name)]


def run_part(arguments: argparse.Namespace) -> int:
    """Run a part and print what it finds; the exit status."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU")
    found: list[Outcome] = []
    about: list[str] = []
    for outcome in outcomes(chosen(arguments), arguments, about.append):
        print(outcome, flush=True)
        found.append(outcome)
        if arguments.out:
            report.save(arguments.out, arguments.part, "".join(about[:1]), found)
    print(*about[:1])
    counts = {status: sum(outcome.status == status for outcome in found) for status in ("PASS", FAIL, SKIP)}
    print(f"{arguments.part}: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    return int(counts[FAIL] > 0 or not found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--part", choices=PARTS)
    task.add_argument("--report", type=Path, help="folder of --out, whose tables --docs gets")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON and as a table")
    parser.add_argument("--docs", type=Path, help="folder whose gpu.md gets the tables")
    parser.add_argument("--only", default="", help="regular expression of checks' names")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="after which no check begins")
    parser.add_argument("--layers", type=int, default=Setting.layers, help="of the large models of `worth`")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, few rounds, no cuDNN and no NCCL: does it run?"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.report:
        report.fill_docs(arguments.report, arguments.docs)
        return 0
    if arguments.worker:
        import torch

        setting = Setting(arguments.quick, arguments.layers)
        if setting.quick:
            torch.backends.cuda.enable_cudnn_sdp(False)
        names = json.load(sys.stdin)
        by_name = {check.name: check for check in checks_of(arguments.part)}
        return serve([by_name[name] for name in names], setting, report.conditions())
    return run_part(arguments)


if __name__ == "__main__":
    sys.exit(main())
