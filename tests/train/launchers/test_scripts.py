"""Scripts in processes: the exit code and last line that a user sees, and a real out-of-memory error."""

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from optimum_memopt import MemOptOptions
from tests import fresh_process
from tests.rotation import nightly

ROOT = Path(__file__).parents[3]
RUN_GLUE = ROOT / "examples" / "run_glue" / "run_glue.py"

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("scipy")


def run_glue(material, folder, *flags):
    material_flags = ["--model_name_or_path", material / "model", "--train_file", material / "rows.json"]
    quick = ["--use_cpu", "true", "--max_steps", 3, "--per_device_train_batch_size", 4, "--report_to", "none"]
    return fresh_process.run(RUN_GLUE, "--output_dir", folder / "run", *material_flags, *quick, *flags)


def test_help_lists_the_flags():
    done = fresh_process.run(RUN_GLUE, "--help")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert all(f"--{field.name} " in text for field in fields(MemOptOptions))
    assert "Plans to enable: cluster_id:strategy:count separated by commas" in text


def test_a_recipe_trains(material, tmp_path):
    """A recipe trains with a plan name that exists only on CUDA."""
    flags = "--memory_opt_engine ort --memory_opt_config BiasGelu+:1:-1 --ort_fallback false"
    done = run_glue(material, tmp_path, *flags.split(), "--log_input_density", "--log_memory_phases")
    assert done.returncode == 0, done.stderr
    assert "BiasGelu+:1:-1 is " in done.stderr and "on this provider" in done.stderr
    assert done.stderr.count("Memory plans of the ort engine") == 1
    assert "VALID TOKENS/BATCH" in done.stderr and "\npre_backward " in done.stderr
    assert "plans on" in done.stdout and "measured peak" in done.stdout and "accuracy" in done.stdout
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_refusal_ends_in_one_line(material, tmp_path):
    """A refusal at the first step, the latest possible, is one line; `test_options.py` and `test_trainer_errors.py`
    test earlier ones."""
    done = run_glue(material, tmp_path, "--memory_opt_engine", "ort", "--memory_opt_config", "Geluu+:1:-1")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith('error: no plan "Geluu+" in this model; did you mean Gelu+'), done.stderr
    assert sum(line.startswith("error: ") for line in lines) == 1
    assert "Traceback" not in done.stderr
    assert "'loss'" not in done.stdout and not (tmp_path / "run" / "model.safetensors").exists()


OUT_OF_MEMORY = """
import resource
import psutil, torch
from accelerate.utils.memory import should_reduce_batch_size
from optimum_memopt import optimize
from tests.model_zoo import ZOO
model = ZOO["roberta-mlm"].build(hidden_dropout_prob=0.1)
engine = optimize(model, memory_opt_config="Dropout+:1:-1", ort_fallback={fallback})
def step(rows):
    model(**ZOO["roberta-mlm"].batch(rows, 32)).loss.backward()
if {warm}:
    step(2)
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (200 << 20), limits[1]))
try:
    step(8000)
    raise SystemExit("memory was enough")
except RuntimeError as error:
    assert isinstance(error, torch.OutOfMemoryError) and should_reduce_batch_size(error), repr(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
step(2)
step(3)
assert [plan.config for plan in engine.plans().enabled] == ["Dropout+:1:-1"]
print("trained on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's address space")
@pytest.mark.parametrize("warm", nightly([True, False], but=[False]), ids=["later", "first-forward"])
def test_out_of_memory_is_torchs_error_and_a_smaller_batch_trains_on(warm):
    done = fresh_process.run("-c", OUT_OF_MEMORY.format(warm=warm, fallback=not warm))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained on"
