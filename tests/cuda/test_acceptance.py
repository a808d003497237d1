"""benchmarks/gpu/acceptance.py from start to end. On the stand-in its figures mean nothing: a check may fail by its
figure, but none may crash."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/gpu/acceptance.py"
# One check of each kind.
FEW = {
    "right": "versions|mark|cuDNN|dropout by|^gradients, roberta, aot|Scaler|released|buffers.*llama, fp32|ion of deb",
    "predicted": "^roberta, fp32, aot_eager|budgets, roberta|plan --device h100, llama|another",
    "worth": "^roberta (eager|ckpt|tc|L1|B_ckpt)$|Trainer",
}
ALL_BUT_DDP = "^(?!DDP)"


def run(part: str, only: str, out: Path, *more: str, **environ: str) -> tuple[int, str]:
    command = [sys.executable, str(PROGRAM), "--part", part, "--quick", "--only", only, "--out", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})
    return done.returncode, done.stdout + done.stderr[-4000:]


def check(part: str, only: str, out: Path, **environ: str) -> None:
    # Two jobs, so that timed checks wait for their turn.
    status, printed = run(part, only, out, "--seconds", "3000", "--jobs", "2", **environ)
    found = json.loads((out / f"{part}.json").read_text())["outcomes"]
    assert [one for one in found if one["crashed"] or one["status"] == "SKIP"] == [], printed
    sys.path.insert(0, str(PROGRAM.parents[1]))
    try:
        from gpu.acceptance import checks_of

        wanted = {check.name for check in checks_of(part) if re.search(only, check.name)}
    finally:
        sys.path.remove(str(PROGRAM.parents[1]))
    # Results that combine several steps have names of their own.
    assert {one["check"] for one in found if not re.search(" of (torch|check)", one["check"])} == wanted
    assert status == int(any(one["status"] == "FAIL" for one in found)), printed
    assert (out / f"{part}.md").read_text().count("\n| ") > len(wanted)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", FEW)
def test_checks_of_each_kind_run_to_their_ends(part, tmp_path):
    check(part, FEW[part], tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", FEW)
def test_every_check_runs_to_its_end(part, tmp_path):
    check(part, ALL_BUT_DDP, tmp_path)


@pytest.mark.timeout(1200)
def test_ddp_runs_to_its_end(tmp_path):
    """DDP's checks run with data, which gloo needs; loops over kernel results would never end with data."""
    check("worth", "DDP", tmp_path, CUDA_STANDIN_DATA="1")


def test_what_no_time_is_left_for_is_skipped(tmp_path):
    status, printed = run("right", "versions|marks", tmp_path, "--seconds", "0")
    assert status == 0 and "FAIL" not in printed.replace("0 FAIL", "")
    assert printed.count("SKIP") == 3 and "the 0 s are over" in printed
