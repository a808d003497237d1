"""Dry runs of a Trainer in this process, and of scripts in processes as a user starts them."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, LlamaConfig, PreTrainedModel, Trainer, TrainingArguments

from optimum_memopt import MemOptError, MemOptTrainer, MemOptTrainingArguments
from optimum_memopt.engines.torch_compat import kernels
from optimum_memopt.predict.phases import DryRun, Evaluation, generation_flags, train_suggestion
from optimum_memopt.sizes import Budget
from optimum_memopt.training.fake_run import dry_run, run_script
from tests.rotation import nightly
from tests.trainer_runs import arguments, build, collate, rows

CLI = "import sys; from optimum.commands.optimum_cli import main; sys.argv[0] = 'optimum-cli'; main()"
EXAMPLES = Path(__file__).parents[2] / "examples"
ROW = {"input_ids": torch.arange(48) % 50 + 3, "attention_mask": torch.ones(48, dtype=torch.int64)}
EQUAL_ROWS = [{**ROW, "labels": ROW["input_ids"]} for _ in range(24)]


def made(folder: Path, kind: type[Trainer] = Trainer, *, eval_rows: Any = None, **changes: Any) -> Trainer:
    asked = {
        name: changes.pop(name) for name in ("compute_metrics", "preprocess_logits_for_metrics") if name in changes
    }
    args = arguments(TrainingArguments, folder, **changes)
    return kind(
        model=build("roberta-mlm"),
        args=args,
        train_dataset=rows("roberta-mlm"),
        eval_dataset=eval_rows,
        data_collator=collate,
        **asked,
    )


def phase(found: DryRun, name: str) -> int:
    return next(each.peak for each in found.phases if each.name == name)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compute_metrics": lambda _: {}},
        {"compute_metrics": lambda _: {}, "eval_accumulation_steps": 2},
        {"compute_metrics": lambda _: {}, "eval_do_concat_batches": False},
        {"compute_metrics": lambda _: {}, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
    ],
)
def test_evaluation_is_what_the_allocator_is_asked_for(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = made(tmp_path, eval_rows=EQUAL_ROWS, per_device_eval_batch_size=4, **changes)
    evaluation = dry_run(trainer, None).evaluation
    assert evaluation is not None
    trainer.evaluate()
    measured = max(itertools.accumulate(kernels.cpu_allocations(trainer.evaluate), initial=0))
    on_host = 0
    if evaluation.accumulation is not None:
        # On a CPU, arrays of the first batches lie in torch's memory.
        on_host = evaluation.accumulation * (evaluation.logits + evaluation.labels)
    # The data loader also holds the next batch.
    batches = 2 * 4 * sum(value.nbytes for value in EQUAL_ROWS[0].values())
    on_device = replace(evaluation, is_on_host=False).peak - evaluation.given
    assert on_device + on_host == pytest.approx(measured, rel=0.02, abs=batches + 1024)


def test_options_show_the_phases_and_end_the_script(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = arguments(MemOptTrainingArguments, tmp_path, memory_opt_dry_run="h100", gradient_accumulation_steps=2)
    model = build("roberta-mlm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = MemOptTrainer(model=model, args=args, train_dataset=rows("roberta-mlm"), data_collator=collate)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert not ended.value.code
    shown = capsys.readouterr().out
    for name in ("load", "forward", "backward", "optimizer", "save", "resume"):
        assert f"\n{name} " in shown
    assert "2 micro-batches" in shown
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trainer.optimizer is None
    assert not any(parameter.grad is not None for parameter in model.parameters())


class OwnLoss(Trainer):
    reads = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = model(**inputs).logits
        if self.reads and (logits > 1e9).any():
            raise ValueError
        return (
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten()) + logits.exp().mean()
        )


def test_a_trainer_with_its_own_loss(tmp_path: Path) -> None:
    own, stock = dry_run(made(tmp_path, OwnLoss), "h100"), dry_run(made(tmp_path), "h100")
    assert phase(own, "backward") > phase(stock, "backward")


def test_training_works_after_a_refused_dry_run(tmp_path: Path) -> None:
    trainer = made(tmp_path, OwnLoss, max_steps=1)
    OwnLoss.reads = True
    try:
        with pytest.raises(
            MemOptError, match=r"the value of a tensor is read .*test_dry_run\w*\.py:\d+, in compute_loss"
        ):
            dry_run(trainer, "h100")
    finally:
        OwnLoss.reads = False
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize(("gradients", "micro_batches", "rows"), [(0, 1, 8), (10, 1, 6), (10, 2, 8), (40, 1, None)])
def test_the_rows_of_a_suggestion_leave_room_for_accumulated_gradients(
    gradients: int, micro_batches: int, rows: int | None
) -> None:
    line = train_suggestion(100, 40, 80, 12, micro_batches, gradients=gradients)
    assert line.endswith("checkpointing, or --memory_opt_budget")
    assert line.partition("--per_device_train_batch_size ")[2].startswith("" if rows is None else f"{rows} with more")
    assert ("--per_device_train_batch_size" in line) == (rows is not None)


def test_a_suggestion_for_a_step_that_checkpoints_names_only_what_is_new() -> None:
    line = train_suggestion(100, 40, 80, 12, checkpoints=True)
    assert line.endswith("with more --gradient_accumulation_steps or --memory_opt_budget")


def test_what_does_not_fit_is_a_line_with_the_flag(tmp_path: Path) -> None:
    trainer = made(tmp_path, eval_rows=EQUAL_ROWS * 1000, compute_metrics=lambda _: {}, per_device_eval_batch_size=8)
    found = dry_run(trainer, "h100", Budget("80MiB", 80 * 2**20))
    (line,) = found.suggestions
    assert line.startswith("evaluation needs ")
    assert "--eval_accumulation_steps " in line
    trainer.args.eval_accumulation_steps = int(line.partition("--eval_accumulation_steps ")[2].split()[0])
    assert not dry_run(trainer, "h100", Budget("80MiB", 80 * 2**20)).suggestions


@pytest.mark.parametrize(
    ("evaluation", "flags"),
    [
        (Evaluation(100, 80, 8, 80), "--per_device_eval_batch_size 5"),
        (Evaluation(100, 10, 8, 800, logits=5), "--eval_accumulation_steps 4 or preprocess_logits_for_metrics"),
        (Evaluation(100, 10, 8, 800, labels=5), "--eval_accumulation_steps 4"),
        (Evaluation(100, 10, 8, 80, logits=60, labels=1), "preprocess_logits_for_metrics"),
        (Evaluation(100, 10, 8, 800, logits=60, labels=60), "--prediction_loss_only"),
        (Evaluation(100, 10, 8, 800, logits=5, labels=1, is_on_host=True), "--prediction_loss_only"),
        (Evaluation(200, 10, 8, 800), ""),
    ],
)
def test_flags_with_which_an_evaluation_fits(evaluation: Evaluation, flags: str) -> None:
    assert evaluation.suggestion(150) == flags


@pytest.mark.parametrize(
    ("limit", "flags"),
    [
        (150, "--steps_per_generation 4, or --use_vllm"),
        (108, "--steps_per_generation 1 --max_completion_length 64, or --use_vllm"),
        (90, ""),
    ],
)
def test_flags_with_which_a_generation_fits(limit: int, flags: str) -> None:
    assert generation_flags(200, 100, limit, 8, 100) == flags


@pytest.mark.parametrize("value", ["b100", ""])
def test_a_device_that_is_not_known(value: str, tmp_path: Path) -> None:
    with pytest.raises(MemOptError, match="--memory_opt_dry_run: device .*allowed: H100"):
        arguments(MemOptTrainingArguments, tmp_path, memory_opt_dry_run=value)


def test_a_device_is_checked_before_the_script_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError")
    with pytest.raises(MemOptError, match="device b100: allowed: H100"):
        run_script(str(tmp_path / "train.py"), [], "b100")


def test_a_script_leaves_libraries_as_they_are(tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        made = PreTrainedModel.from_pretrained.__func__
        return Trainer.train, made, torch.nn.Module.to, torch.nn.Module.cuda, list(sys.path), sys.argv

    before = state()
    (tmp_path / "train.py").write_text("raise KeyError('own')")
    with pytest.raises(KeyError, match="own"):
        run_script(str(tmp_path / "train.py"), ["--flag"], "h100")
    assert state() == before


def run_command(*args: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", CLI, "memopt", "dry-run", "--device", "h100", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)


CLASSIFICATION = """
import torch
from transformers import AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = AutoModelForSequenceClassification.from_pretrained("bert")
rows = [{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": n % 2} for n in range(8, 64)]


def collate(features):
    longest = max(len(row["input_ids"]) for row in features)
    padded = lambda name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in features])
    labels = torch.tensor([row["labels"] for row in features])
    return {"input_ids": padded("input_ids"), "attention_mask": padded("attention_mask"), "labels": labels}


trainer = Trainer(
    model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate, compute_metrics=lambda found: {}
)
trainer.train()
print("trained")
"""


def test_a_stock_script(tmp_path: Path) -> None:
    BertConfig(num_hidden_layers=2).save_pretrained(tmp_path / "bert")
    (tmp_path / "train.py").write_text(CLASSIFICATION)
    done = run_command("train.py", "--output_dir", "out", "--bf16", "--gradient_checkpointing", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Trainer, BertForSequenceClassification, batch 8 x 63, bf16, adamw_torch_fused, on h100" in done.stdout
    assert "logits and labels are collected" in done.stdout
    assert "trained" not in done.stdout


TOKENIZER = """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, PreTrainedTokenizerFast

tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
"""
SFT = """
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
data = Dataset.from_dict({"text": ["a " * count for count in range(10, 100)]})
adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer("llama", args=args, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
trainer.train()
"""
QLORA = SFT.replace(
    'SFTTrainer("llama", ', "SFTTrainer(AutoModelForCausalLM.from_pretrained('llama', quantization_config=four_bits), "
).replace(
    "from peft",
    """
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
from peft""",
)
IN_8_BITS = re.sub(r"load_in_4bit=True.*\)", "load_in_8bit=True)", QLORA)

DPO = """
from trl import DPOConfig, DPOTrainer

(args,) = HfArgumentParser(DPOConfig).parse_args_into_dataclasses()
texts = {name: ["a " * count for count in range(10, 50)] for name in ("prompt", "chosen", "rejected")}
DPOTrainer("llama", args=args, train_dataset=Dataset.from_dict(texts), processing_class=tokenizer).train()
"""
ONLINE = """
from trl import {0}Config, {0}Trainer

(args,) = HfArgumentParser({0}Config).parse_args_into_dataclasses()
trainer = {0}Trainer(
    "llama",
    args=args,
    train_dataset=Dataset.from_dict({{"prompt": ["a a", "a a a a a a"] * 20}}),
    processing_class=tokenizer,
    reward_funcs=lambda completions, **_: [1.0] * len(completions),
)
trainer.train()
"""
CACHE = "the key-value cache of 8 x 518 tokens"


@pytest.mark.parametrize(
    ("script", "lines"),
    nightly(
        [
            (SFT, ("SFTTrainer, PeftModelForCausalLM, batch 8 x 100, bf16", "\nmerge ")),
            (QLORA, ("SFTTrainer, PeftModelForCausalLM, batch 8 x 100, bf16", "\nbackward ")),
            (IN_8_BITS, ("SFTTrainer, PeftModelForCausalLM, batch 8 x 100, bf16", "\nbackward ")),
            (DPO, ("DPOTrainer, LlamaForCausalLM, batch 16 x ", "\nbackward ")),
            (ONLINE.format("GRPO"), ("GRPOTrainer, LlamaForCausalLM, batch from the data, bf16", CACHE)),
            (ONLINE.format("RLOO"), ("RLOOTrainer, LlamaForCausalLM, batch from the data, bf16", CACHE, "\nno-grad ")),
        ]
    ),
)
def test_a_stock_script_of_trl(script: str, lines: tuple[str, ...], tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "llama")
    (tmp_path / "train.py").write_text(TOKENIZER + script)
    done = run_command("train.py", "--output_dir", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(line in done.stdout for line in lines), done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], ["--qlora"]], ids=["all of it", "qlora"])
def test_the_example(flags: list[str], tmp_path: Path) -> None:
    """The sft example has a dry run; with `--qlora` it saves its model and loads it quantized."""
    arguments = ["--output_dir", "out", "--max_train_samples", "64", "--max_eval_samples", "32", *flags]
    done = run_command(str(EXAMPLES / "sft/sft.py"), *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("PeftModelForCausalLM" in done.stdout) == bool(flags)
    for name in ("load", "forward", "backward", "optimizer", "evaluation", "save"):
        assert f"\n{name} " in done.stdout


@pytest.mark.parametrize(
    ("script", "line"),
    nightly(
        [
            (None, "no such file"),
            ("print('done')", "the script ended without a Trainer's train()"),
            (
                "from transformers import AutoModel, BitsAndBytesConfig\n"
                "AutoModel.from_pretrained('bert', quantization_config=object())",
                "weights are quantized",
            ),
        ]
    ),
)
def test_scripts_without_phases(script: str | None, line: str, tmp_path: Path) -> None:
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    if script is not None:
        (tmp_path / "train.py").write_text(script)
    done = run_command("train.py", folder=tmp_path)
    assert done.returncode == 2
    (error,) = [shown for shown in done.stderr.splitlines() if shown.startswith("error: ")]
    assert line in error


@pytest.mark.parametrize(
    ("given", "kind"), [("fsdp='full_shard'", "FSDP"), ("deepspeed={'train_batch_size': 8}", "DeepSpeed")]
)
def test_a_sharded_run_is_refused_before_it_looks_for_ranks(given: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(f"from transformers import TrainingArguments\nTrainingArguments('out', {given})\n")
    before = TrainingArguments.__post_init__
    with pytest.raises(MemOptError, match=rf"^dry run: {kind} shards the model, .*; optimum-cli memopt plan --fsdp 8"):
        run_script(str(script), [], "h100")
    assert TrainingArguments.__post_init__ is before


def test_a_chosen_micro_batch_is_refused(tmp_path: Path) -> None:
    chosen = {"memory_opt_batch": "auto", "memory_opt_budget": "1GiB"}
    with pytest.raises(MemOptError, match="--memory_opt_dry_run with --memory_opt_batch auto: a dry run shows"):
        arguments(MemOptTrainingArguments, tmp_path, memory_opt_dry_run="h100", **chosen)
