"""The examples' configs work with the launchers as the READMEs describe, on a tiny model."""

import json
import shlex

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from transformers import HfArgumentParser

from tests.fresh_process import free_port
from tests.train.launchers.launching import PROGRAMS, ROOT, launcher, needs_compiler, needs_deepspeed, run_jobs, start
from tests.train.launchers.worker import Job
from tests.trainer_runs import distance

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("scipy")

from run_glue import run_glue as run_glue_script
from run_mlm import run_mlm as run_mlm_script

EXAMPLES = ROOT / "examples"
STAGES = (1, 2, 3)
TOTAL = "Total train batch size (w. parallel, distributed & accumulation) = 8"


def configs(name):
    return EXAMPLES / name / "configs"


def run_glue(command, material, folder, *flags):
    """Run three steps of run_glue in two processes with batch size 4."""
    data = ["--model_name_or_path", material / "model", "--train_file", material / "rows.json"]
    quick = ["--use_cpu", "true", "--max_steps", 3, "--per_device_train_batch_size", 4, "--report_to", "none"]
    own = ["--memory_opt_engine", "ort", "--log_level", "info"]
    script = EXAMPLES / "run_glue" / "run_glue.py"
    return start([*command, script, "--output_dir", folder / "run", *data, *quick, *own, *flags])


def check_trained(done):
    # torch 2.13's gloo sometimes aborts when the interpreter exits; the checks below show that the run was complete.
    assert done.returncode == 0 or "(SIGABRT)" in done.stderr, done.stderr[-4000:]
    assert TOTAL in done.stdout + done.stderr
    assert done.stderr.count("Memory plans of the ort engine") == 1
    assert done.stdout.count("measured peak") == 1 and done.stdout.count("plans on       Gelu+:1:-1 (1 of 1)") == 1


@pytest.mark.parametrize(
    "file", ["accelerate_cpu_2.yaml", "accelerate_gpu.yaml", *(f"ds_zero{n}.json" for n in STAGES)]
)
def test_both_examples_have_the_same_configs(file):
    glue, mlm = ((configs(name) / file).read_text().replace(name, "") for name in ("run_glue", "run_mlm"))
    assert glue == mlm


@pytest.mark.parametrize("file", ["accelerate_cpu_2.yaml", "accelerate_gpu.yaml"])
def test_accelerate_reads_the_configs(file):
    config = load_config_from_file(str(configs("run_glue") / file))
    assert (config.distributed_type.value, config.num_processes, config.num_machines) == ("MULTI_GPU", 2, 1)


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_configs_say_their_stage_and_fused_adam(stage):
    config = json.loads((configs("run_glue") / f"ds_zero{stage}.json").read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert config["optimizer"]["type"] == "AdamW" and config["optimizer"]["params"]["torch_adam"] is False


def commands(name):
    """Returns the README's commands that run its script, from blocks and tables, with line breaks joined."""
    text = (EXAMPLES / name / "README.md").read_text().replace("\\\n", " ")
    lines = [part for line in text.splitlines() for part in line.split("`")]
    return [shlex.split(line.strip()) for line in lines if f"examples/{name}/{name}.py --" in line]


@pytest.mark.parametrize(
    "kinds",
    [
        (run_glue_script.GlueArguments, run_glue_script.ModelArguments, run_glue_script.TrainingArguments),
        (run_mlm_script.MlmArguments, run_mlm_script.ModelArguments, run_mlm_script.TrainingArguments),
    ],
    ids=["run_glue", "run_mlm"],
)
def test_the_commands_of_the_readmes_can_be_read(request, kinds):
    """The READMEs' commands have valid flags and files; that they train was checked when they were written."""
    name = request.node.callspec.id
    found = commands(name)
    assert len(found) >= 10
    for words in found:
        place = next(index for index, word in enumerate(words) if word.endswith(f"{name}.py"))
        assert HfArgumentParser(kinds).parse_args(words[place + 1 :]).memory_opt_engine in ("ort", "compile")
        files = [ROOT / word for word in words if word.startswith("examples/")]
        assert all(file.is_file() for file in files)


@pytest.mark.nightly
def test_two_processes_on_the_cpu(material, tmp_path):
    config = configs("run_glue") / "accelerate_cpu_2.yaml"
    command = [PROGRAMS / "accelerate", "launch", "--config_file", config, f"--main_process_port={free_port()}"]
    check_trained(run_glue(command, material, tmp_path, "--memory_opt_config", "BiasGelu+:1:-1"))


@pytest.mark.extensions
@needs_deepspeed
@needs_compiler
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.timeout(1200)
def test_two_processes_of_deepspeed(material, tmp_path, stage):
    flags = ["--deepspeed", configs("run_glue") / f"ds_zero{stage}.json", "--memory_opt_config", "Gelu+:1:-1"]
    done = run_glue(launcher("deepspeed"), material, tmp_path, *flags)
    if stage == 3:
        assert done.returncode != 0
        assert "error: DeepSpeed ZeRO stage 3 with the ort engine" in done.stderr and "'loss'" not in done.stdout
    else:
        check_trained(done)


@pytest.mark.extensions
@needs_deepspeed
@needs_compiler
@pytest.mark.timeout(1200)
def test_deepspeeds_configs_step_with_fused_adam(tmp_path):
    files = {stage: str(configs("run_glue") / f"ds_zero{stage}.json") for stage in STAGES}
    jobs = [
        Job(f"{engine}-{stage}", engine, arguments={"deepspeed": files[stage], "weight_decay": 0.1})
        for engine, stage in [("plain", 1), ("ort", 1), ("plain", 2), ("ort", 2), ("plain", 3)]
    ]
    done = run_jobs(launcher("torchrun"), tmp_path, jobs)
    assert {rank["optimizer"] for job in jobs for rank in done.trained(job.name)} == {"FusedAdam"}
    for stage in (1, 2):
        assert distance(done.weights(f"ort-{stage}"), done.weights(f"plain-{stage}")) < 1e-5
