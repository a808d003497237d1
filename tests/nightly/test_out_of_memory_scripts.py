"""Scripts under a memory limit: from the traceback to a run that trains with the flag that the report recommends."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits a process's data")

HEAD = """
import os
import torch
from datasets import Dataset
from transformers import HfArgumentParser
import optimum_memopt.engines.compile.train.engine, optimum_memopt.engines.ort.engine
from optimum_memopt import MemOptOptions, MemOptTrainer, MemOptTrainingArguments, attach
from optimum_memopt.engines.compile.predict import explain
from tests.limited_memory import limit_data

# What is imported takes more than the step, and the same with every flag.
# On a busy machine the search takes longer than an error waits for it.
explain._SECONDS = 300.0
limit_data(int(os.environ["MEMORY_MIB"]) << 20)

torch.manual_seed(0)
def rows(count, length, vocabulary):
    ids = torch.randint(5, vocabulary, (count, length))
    return Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids])
"""
SCRIPTS = {
    "clm": """
from transformers import GPT2Config, GPT2LMHeadModel
(args,) = HfArgumentParser(MemOptTrainingArguments).parse_args_into_dataclasses()
sizes = dict(n_embd=128, n_layer=2, n_head=4, n_positions=128, vocab_size=4000, bos_token_id=2, eos_token_id=3)
trainer = MemOptTrainer(GPT2LMHeadModel(GPT2Config(**sizes)), args, train_dataset=rows(256, 128, 4000))
trainer.train()
""",
    "mlm": """
from transformers import RobertaConfig, RobertaForMaskedLM
(args,) = HfArgumentParser(MemOptTrainingArguments).parse_args_into_dataclasses()
sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=4000)
trainer = MemOptTrainer(RobertaForMaskedLM(RobertaConfig(**sizes)), args, train_dataset=rows(256, 128, 4000))
trainer.train()
""",
    "trl": """
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer
from tests.train.trainers.harness import tokenizer
args, options = HfArgumentParser((SFTConfig, MemOptOptions)).parse_args_into_dataclasses()
args.gradient_checkpointing = False
sizes = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, vocab_size=4000)
model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=128, pad_token_id=1))
trainer = SFTTrainer(model, args, train_dataset=rows(256, 128, 4000), processing_class=tokenizer())
attach(trainer, options)
trainer.train()
""",
}
FLAGS = (
    "--use_cpu --report_to none --save_strategy no --disable_tqdm true --max_steps 2 --per_device_train_batch_size 128"
)
# The steps take more than 900 MiB.
MIB = 640


def run(script: Path, flags: str, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "MEMORY_MIB": str(MIB)}
    return fresh_process.run(script, "--output_dir", folder, *shlex.split(flags), environment=environment, timeout=900)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_recommended_flag_gets_the_script_to_train(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[name])
    failed = run(script, FLAGS, tmp_path / "run")
    assert failed.returncode == 1, failed.stderr[-3000:]
    assert "memory ran out in step 1" in failed.stderr, failed.stderr[-3000:]
    assert "memory" in failed.stderr.strip().splitlines()[-1]
    report = json.loads((tmp_path / "run" / "memory_report.json").read_text())
    recommended = report["suggestions"][0]["flags"]
    assert f"  {recommended}\n" in failed.stderr
    # If a flag is given twice, the last one counts.
    trained = run(script, f"{FLAGS} {recommended}", tmp_path / "run")
    assert trained.returncode == 0, trained.stderr[-3000:]
    assert "train_loss" in trained.stdout
