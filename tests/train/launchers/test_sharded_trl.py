"""TRL's SFTTrainer under FSDP2 and ZeRO 3 on two ranks: through `examples/sft` with its configs, and against a stock
SFTTrainer."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from transformers import HfArgumentParser

from tests.fresh_process import free_port
from tests.model_zoo import ZOO
from tests.train.launchers import accelerators
from tests.train.launchers.launching import PROGRAMS, ROOT, launcher, needs_deepspeed, run_jobs, start
from tests.train.launchers.sharded_jobs import SAVED, differing
from tests.train.launchers.test_fsdp import jobs as fsdp2_jobs
from tests.train.launchers.test_zero3 import jobs as zero3_jobs
from tests.trainer_runs import CLOSE, distance

pytest.importorskip("trl")
pytest.importorskip("peft")

from trl import SFTConfig

from common.arguments import RowArguments
from optimum_memopt import MemOptOptions
from sft import sft as sft_script

EXAMPLE = ROOT / "examples" / "sft"
CONFIGS = EXAMPLE / "configs"


@pytest.mark.parametrize("file, kind", [("accelerate_fsdp2.yaml", "FSDP"), ("accelerate_zero3.yaml", "DEEPSPEED")])
def test_accelerate_reads_the_configs(file: str, kind: str) -> None:
    config = load_config_from_file(str(CONFIGS / file))
    assert (config.distributed_type.value, config.num_processes, config.num_machines) == (kind, 2, 1)


def test_the_commands_of_the_readme_can_be_read() -> None:
    text = (EXAMPLE / "README.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if "examples/sft/sft.py --" in line]
    assert len(commands) == 5
    kinds = (sft_script.ModelArguments, RowArguments, SFTConfig, MemOptOptions)
    for words in commands:
        place = words.index("examples/sft/sft.py")
        parsed = HfArgumentParser(kinds).parse_args([*words[place + 1 :], "--use_cpu", "true", "--bf16", "false"])
        assert parsed.memory_opt_engine == "compile"
        assert all((ROOT / word).is_file() for word in words if word.startswith("examples/"))


@pytest.fixture(scope="module")
def llama(material: Path) -> Path:
    """Returns the folder with a tiny Llama added, for the tokenizer's words."""
    model = ZOO["llama"].build(num_hidden_layers=3)
    shutil.copytree(material / "model", material / "llama", ignore=shutil.ignore_patterns("*.safetensors", "config*"))
    model.save_pretrained(material / "llama")
    return material


def sft(command: list[Any], material: Path, folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Run three steps of the example, and return its output and the trained weights."""
    rows = {"--model_name_or_path": material / "llama", "--train_file": material / "texts.json"}
    quick = "--use_cpu true --bf16 false --max_steps 3 --per_device_train_batch_size 4 --report_to none"
    rounding = "--learning_rate 1e-2 --adam_epsilon 1e-3"
    own = "--memory_opt_engine compile --memory_opt_level 1 --memory_opt_compiler aot_eager"
    flags = [*(word for pair in rows.items() for word in pair), *f"{quick} {rounding} {own}".split()]
    done = start([*command, EXAMPLE / "sft.py", "--output_dir", folder, *flags])
    assert done.returncode == 0 or "(SIGABRT)" in done.stderr, done.stderr[-4000:]
    assert "level 1" in done.stdout and " for 3 layers, equal layers share one" in done.stdout
    assert "NOT " not in done.stderr
    return done.stdout, load_file(folder / "model.safetensors")


def launch(file: str) -> list[Any]:
    port = f"--main_process_port={free_port()}"
    return [PROGRAMS / "accelerate", "launch", "--config_file", CONFIGS / file, port]


@pytest.mark.nightly
@needs_deepspeed
def test_both_configs_of_the_example_train_alike(llama: Path, tmp_path: Path) -> None:
    summary, fsdp2 = sft([*launch("accelerate_fsdp2.yaml"), accelerators.__file__], llama, tmp_path / "fsdp2")
    _, zero3 = sft(launch("accelerate_zero3.yaml"), llama, tmp_path / "zero3")
    assert "FSDP2 on 2 ranks" in summary
    assert distance(fsdp2, zero3) < CLOSE


ACCUMULATION = {"gradient_accumulation_steps": 2}
LORA = {"adapters": ["q_proj", "down_proj"]}
# TRL's default.
CHECKPOINTING = {"gradient_checkpointing": True}
FSDP2: dict[str, dict[str, Any]] = {
    "level": {"arguments": {"bf16": True, **ACCUMULATION, **SAVED}},
    "lora": LORA,
    # The chunked loss is TRL's own.
    "chunked": {"plan": {"memory_opt_loss": "chunked", "memory_opt_level": 1}},
    "budget": {"plan": {"memory_opt_budget": "90%"}},
    "checkpointing": {"plan": {"memory_opt_level": 0}, "arguments": CHECKPOINTING},
}
ZERO3: dict[str, dict[str, Any]] = {
    "level": {},
    "lora": {**LORA, "bf16": True, "sharded_from_start": True, "arguments": ACCUMULATION},
    "checkpointing": {"plan": {"memory_opt_level": 0}, "arguments": CHECKPOINTING},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "make, cases",
    [(fsdp2_jobs, FSDP2), pytest.param(zero3_jobs, ZERO3, marks=needs_deepspeed)],
    ids=["fsdp2", "zero3"],
)
def test_weights_are_those_of_a_stock_sft_trainer(tmp_path: Path, make: Any, cases: dict[str, Any]) -> None:
    wanted = [job for name, case in cases.items() for job in make(name, tmp_path, sft=True, **case)]
    done = run_jobs(launcher("torchrun"), tmp_path, wanted, WITHOUT_SHARED_MEMORY="1")
    for job in wanted:
        name, ranks = job.name.partition("-")[0], done.trained(job.name)
        assert {rank["world_size"] for rank in ranks} == {2} and len({rank["digest"] for rank in ranks}) == 1
        assert differing(done.weights(job.name), done.weights(f"{name}-plain")) == []
        if job.engine == "compile":
            header = ranks[0]["table"]["header"][0]
            assert "for 3 layers, equal layers share one" in header
            assert ("level 1" in header) == (name != "budget")
            assert not [line for line in ranks[0]["lines"] if "NOT " in line or "one graph for" in line]
