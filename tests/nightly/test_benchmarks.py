import argparse
import json
import subprocess
import sys
from pathlib import Path

import budget_baselines
import frontier
import loss
import pytest
from budget_baselines import Compared
from gpu import report
from loss_worker import PLAIN


def test_budget_baselines(tmp_path):
    """Peaks of checkpointing are between level 1 and no plan, and the solver is never slower than a baseline."""
    saved = {}
    budget_baselines.run(saved, lambda: None, argparse.Namespace(quick=True))
    compared = {one["name"]: Compared(**one) for one in saved["RoBERTa-base"]["compared"]}
    everything = saved["RoBERTa-base"]["everything"]
    assert len([name for name in compared if name.startswith("row ")]) > 5
    assert compared["checkpointing, all layers"].peak < compared["checkpointing, 1 of 2 layers"].peak < everything
    assert compared["level 1"].seconds > 0
    assert all(one.solver_peak <= one.peak and one.ratio <= 1.0 + 1e-6 for one in compared.values())
    (text,) = budget_baselines.sections(saved).values()
    assert "| checkpointing, all layers" in text
    budget_baselines.plot(saved, tmp_path / "found.svg")
    assert "checkpointing" in (tmp_path / "found.svg").read_text()


def test_frontier_runs_real_processes_and_repeats_none(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "frontier.md").write_text(
        "<!-- conditions: begin -->\n<!-- conditions: end -->\n<!-- roberta: begin -->\n<!-- roberta: end -->\n"
    )
    found = tmp_path / "found.json"
    sizes = "--layers 4 --hidden 64 --batch_size 16 --seq_len 64 --budgets 0.3 --every 1"
    command = [sys.executable, frontier.__file__, "--models", "roberta", *sizes.split()]
    command += ["--only", "all layers|budget|compile: level 1", "--json", str(found), "--docs", str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    results = {one["baseline"]["name"]: one for one in json.loads(found.read_text())["models"]["roberta"]}
    assert all(len(one["runs"]) == 1 and not one["error"] for one in results.values())
    peaks = {name: one["runs"][0]["peak_mib"] - one["runs"][0]["held_mib"] for name, one in results.items()}
    assert len(peaks) == 4
    for name in ("checkpointing, all layers", "budget 0.3, aot_eager", "compile: level 1, aot_eager"):
        assert peaks[name] < peaks["eager"]
        assert f"| {name}" in (tmp_path / "frontier.md").read_text()
    assert "eager" in (tmp_path / "frontier.svg").read_text()


def test_loss(tmp_path):
    page, found = tmp_path / "loss.md", tmp_path / "loss.json"
    page.write_text("<!-- losses: begin -->\n<!-- losses: end -->\n")
    command = [sys.executable, loss.__file__, "--quick", "--only", "masked", "--losses", "eager", "chunked"]
    subprocess.run([*command, "--json", found, "--docs", tmp_path], check=True, capture_output=True)
    measured = json.loads(found.read_text())["cases"]["masked LM, 15% labels"]
    assert measured["chunked"]["peak"] < measured[PLAIN]["peak"] <= measured["eager"]["peak"]
    assert "| chunked " in page.read_text()


def test_gpu_checks_need_no_more_than_torch_transformers_and_accelerate():
    """The checks run from a checkout that is not installed, without optimum, scipy, ONNX Runtime and matplotlib."""
    script = """
import sys
for absent in ("matplotlib", "onnxruntime", "optimum", "peft", "scipy"):
    sys.modules[absent] = None
from gpu.acceptance import PARTS, checks_of
checks = [check for part in PARTS for check in checks_of(part)]
assert len({check.name for check in checks}) == len(checks) > 50
print({check.name.split(",")[0] for check in checks if check.missing()})
"""
    folder = Path(report.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "budgets" in done.stdout and "kernels" not in done.stdout
