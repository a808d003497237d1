"""Tests every CUDA path on one GPU, in 10 minutes on a machine with 16 cores.

    python benchmarks/gpu/acceptance.py --out results --earlier h100/engine.json
    python benchmarks/gpu/acceptance.py --only "^llama" --out results
    python benchmarks/gpu/acceptance.py --report results --docs docs

Parts (--part selects one):

- `right`: kernels, buffers, gradients, dropout, offload with delayed copies, fp16.
- `predicted`: bytes and budgets against torch's allocator; how much of the copies is hidden.
- `worth`: the time and peak of a step against other ways to save memory or time; Trainer and DDP.

Runs from a checkout, with torch 2.9 or later, transformers 5, accelerate and tabulate; budgets also need scipy, some
checks peft or Liger Kernel. Nothing is downloaded. Prints each figure when it is measured, as `PASS|FAIL|SKIP name
figure limit`, and exits with 1 if one failed. --out gets the same as JSON and as a Markdown table.

Each check runs in a process of its own. Checks compile, and compare gradients and bytes, in parallel; a timed part
waits until nothing else runs, and then runs alone.
"""

import argparse
import contextlib
import importlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Works in a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu import report
from gpu.checks import FAIL, SKIP, Check, Outcome, Setting, crash, heard, serve

PARTS = ("right", "predicted", "worth")
# Seconds after which the remaining checks are skipped, and their share for checks that run in parallel.
SECONDS, _SIDE_BY_SIDE = 600, 0.6
# Most processes that run in parallel, each of which takes several GiB of the device; and how many processes may exist
# for each of them but the first, since waiting processes have their model on the host.
_MOST, _THERE = 10, 4
_PATIENCE = 10
_LOOK = 0.05


def checks_of(part: str) -> list[Check]:
    """Returns the checks of a part, in the order in which they start."""
    return list(importlib.import_module(f"gpu.{part}").CHECKS)


class Running:
    """A check in its process.

    Attributes:
        is_ready: whether the check waits for its turn.
        has_ended: whether the check has reported its end.
        limit: when the check times out, on the monotonic clock.
    """

    def __init__(self, part: str, check: Check, arguments: argparse.Namespace, folder: str) -> None:
        self.part, self.check, self.is_ready, self.has_ended = part, check, False, False
        self._seconds = check.seconds * (_PATIENCE if arguments.quick else 1)
        self.limit = time.monotonic() + self._seconds
        command = [sys.executable, __file__, "--part", part, "--worker", check.name, *["--quick"] * arguments.quick]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "MEMOPT_GPU_FOLDER": folder}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yields the events since the last call; None if the process has ended."""
        while not self._lines.empty():
            line = self._lines.get()
            if line is None:
                yield None
            elif (event := heard(line)) is not None:
                yield event

    def go_on(self) -> None:
        """Make the waiting check continue, alone."""
        self.is_ready, self.limit = False, time.monotonic() + self._seconds
        assert self._process.stdin is not None
        # The process may have died.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def end(self) -> int:
        """Wait for the process to end, and return its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill the process and the compilers that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def outcomes(
    checks: Sequence[tuple[str, Check]], arguments: argparse.Namespace, note_conditions: Callable[[str], None]
) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcomes of all checks, each with its part.

    Args:
        checks: checks with their parts, in the order in which they start.
        arguments: the command-line arguments.
        note_conditions: called with the conditions that the figures depend on besides the models.
    """
    begin = time.monotonic()
    deadline, beside = begin + arguments.seconds, begin + _SIDE_BY_SIDE * arguments.seconds
    waiting, running, is_alone = list(checks), list[Running](), False
    there = 1 + _THERE * (arguments.jobs - 1)
    with tempfile.TemporaryDirectory() as folder:
        while (waiting or running) and (now := time.monotonic()) < deadline:
            busy = [each for each in running if not each.is_ready]
            is_alone = is_alone and bool(busy)
            while waiting and now < beside and not is_alone and len(busy) < arguments.jobs and len(running) < there:
                running.append(Running(*waiting.pop(0), arguments, folder))
                busy.append(running[-1])
            if not busy and running:
                running[0].go_on()
                is_alone = True
            for each in list(running):
                for event in each.events():
                    if event is None:
                        running.remove(each)
                        status = each.end()
                        if not each.has_ended:
                            yield each.part, crash(each.check.name, f"the process ended with {status}")
                    elif "conditions" in event:
                        note_conditions(event["conditions"])
                    elif "outcome" in event:
                        yield each.part, Outcome(**event["outcome"])
                    else:
                        each.has_ended |= "end" in event
                        each.is_ready |= "ready" in event
                is_late = not is_alone and now > beside
                if each in running and not each.is_ready and (now > each.limit or is_late):
                    running.remove(each)
                    each.kill()
                    why = "was not prepared in time" if is_late else "ran past its time"
                    yield each.part, crash(each.check.name, why)
            time.sleep(_LOOK)
        for each in running:
            each.kill()
    for part, check in [*((each.part, each.check) for each in running), *waiting]:
        yield part, Outcome(check.name, SKIP, "", f"the {arguments.seconds} s are over")


def chosen(arguments: argparse.Namespace) -> list[tuple[str, Check]]:
    """Returns the selected checks with their parts, the longest first."""
    wanted, parts = re.compile(arguments.only), [arguments.part] if arguments.part else PARTS
    found = [(part, check) for part in parts for check in checks_of(part) if wanted.search(check.name)]
    return sorted(found, key=lambda item: -item[1].seconds)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print their outcomes, and return the exit status."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU")
    found: dict[str, list[Outcome]] = {}
    about: list[str] = []

    def note(part: str, outcome: Outcome) -> None:
        print(outcome, flush=True)
        found.setdefault(part, []).append(outcome)
        if arguments.out:
            report.save(arguments.out, part, "".join(about[:1]), found[part])

    for part, outcome in outcomes(chosen(arguments), arguments, about.append):
        note(part, outcome)
    steps = report.steps(found.get("worth", ()))
    for outcome in report.goals(steps, is_quick=arguments.quick):
        note("worth", outcome)
    if arguments.earlier:
        print(report.compared(steps, arguments.earlier))
    print(*about[:1])
    every = [outcome for outcomes_of_part in found.values() for outcome in outcomes_of_part]
    counts = {status: sum(outcome.status == status for outcome in every) for status in ("PASS", FAIL, SKIP)}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(counts[FAIL] > 0 or not every)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--report", type=Path, help="do not run: write the tables of this --out folder to --docs")
    parser.add_argument("--out", type=Path, help="folder for the figures as JSON and as a table")
    parser.add_argument("--docs", type=Path, help="folder whose gpu.md gets the tables")
    parser.add_argument("--earlier", type=Path, help="worth.json of an earlier run, to compare steps with")
    parser.add_argument("--only", default="", help="regular expression for names of checks")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="time limit for all checks")
    jobs = max(1, min(_MOST, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="checks side by side (default %(default)s here)")
    parser.add_argument(
        "--quick", action="store_true", help="smoke test: tiny models, few rounds, no cuDNN and no NCCL"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.report:
        report.fill_docs(arguments.report, arguments.docs)
        return 0
    if arguments.worker:
        import torch

        setting = Setting(arguments.quick)
        if setting.quick:
            torch.backends.cuda.enable_cudnn_sdp(False)
        by_name = {check.name: check for check in checks_of(arguments.part)}
        serve(by_name[arguments.worker], setting, report.conditions())
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
