"""QLoRA with TRL's SFTTrainer, with an engine against the same script without one: losses, gradients and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import peft
import trl
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, LlamaForCausalLM, TrainerCallback

from optimum_memopt import attach
from tests import fresh_process
from tests.rotation import nightly
from tests.train.trainers import harness
from tests.train.trainers.harness import Memopt, Outcome
from tests.train.trainers.test_trl import QUIET, texts

FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)
EXAMPLE = Path(__file__).parents[3] / "examples" / "sft" / "sft.py"
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}


class Gradients(TrainerCallback):
    """Records the gradients of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        self.steps.append({name: parameter.grad.clone() for name, parameter in trained})


def trainer(folder: Path, **changes: Any) -> trl.SFTTrainer:
    """Returns a Trainer for a Llama loaded as users load it, without evaluations, after which the stock run's
    gradients would be wrong on a CPU with AVX512-BF16 (`keep_unpacked` in `compat/bitsandbytes.py`)."""
    LlamaForCausalLM(harness.llama_config(num_hidden_layers=2)).save_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model", quantization_config=FOUR_BITS)
    return trl.SFTTrainer(
        model=peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False),
        args=harness.arguments(trl.SFTConfig, folder, **{**QUIET, **changes}),
        train_dataset=texts(24),
        processing_class=harness.tokenizer(),
        peft_config=peft.LoraConfig(**LORA),
    )


def qlora(folder: Path, memopt: Memopt) -> Outcome:
    made, gradients = trainer(folder), Gradients()
    made.add_callback(gradients)
    outcome = harness.trained(made, memopt)
    # Two LoRA factors for each of seven linear layers in two decoder layers.
    assert len(gradients.steps) == 6 and all(len(step) == 2 * 7 * 2 for step in gradients.steps)
    outcome.extra["gradients"] = gradients.steps
    return outcome


@pytest.mark.parametrize(
    ("options", "has_plans"),
    nightly(
        # `test_matrix.py` tests budgets that need a plan.
        [({"memory_opt_level": 0}, False), ({"memory_opt_level": 1}, True), ({"memory_opt_budget": "99%"}, False)],
        but=[({"memory_opt_level": 1}, True)],
    ),
    ids=["no plan", "level 1", "budget"],
)
def test_losses_gradients_and_weights(options, has_plans, stock, tmp_path):
    ours = harness.run(qlora, tmp_path, "compile", **{"memory_opt_level": 0, **options})
    assert bool(ours.plans_on) == has_plans
    harness.assert_equal(ours, stock("qlora", qlora))


@pytest.mark.nightly
def test_under_the_plan_file_of_another_run(stock, tmp_path):
    first = trainer(tmp_path / "first", max_steps=1)
    attached = attach(first, **harness.ENGINES["compile"])
    first.train()
    attached.save_plan(tmp_path / "plan.json")
    again = {"memory_opt_level": 0, "memory_opt_plan": str(tmp_path / "plan.json")}
    ours = harness.run(qlora, tmp_path / "second", "compile", **again)
    assert ours.plans_on == len(attached.table.enabled) > 0
    harness.assert_equal(ours, stock("qlora", qlora))


def example(folder: Path, *flags: object) -> tuple[str, dict[str, torch.Tensor]]:
    """Run two steps of `examples/sft --qlora`, and return the output and the saved adapter."""
    quick = "--qlora --use_cpu true --bf16 false --gradient_checkpointing false --report_to none --max_steps 2"
    sizes = "--max_train_samples 16 --max_eval_samples 4 --max_length 32 --per_device_train_batch_size 4"
    arguments = [*quick.split(), *sizes.split(), "--memory_opt_compiler", "aot_eager", "--memory_opt_loss", "plain"]
    # Also evaluates between the steps.
    arguments += ["--eval_strategy", "steps", "--eval_steps", 1, "--memory_opt_engine", "compile", *flags]
    done = fresh_process.run(EXAMPLE, "--output_dir", folder, *arguments, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, load_file(folder / "adapter_model.safetensors")


@pytest.mark.nightly
def test_the_example_trains_the_same_under_each_plan(tmp_path):
    """The example trains the same under each plan, with a user's own checkpoint and rows."""
    # Without an engine, bitsandbytes may repack blocks of 64 weights in an evaluation (`Linear4bit.forward`, 0.50).
    config = harness.llama_config(num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    harness.tokenizer().save_pretrained(tmp_path / "model")
    texts(24).to_json(tmp_path / "rows.json")
    own = ["--model_name_or_path", tmp_path / "model", "--train_file", tmp_path / "rows.json"]
    stock, expected = example(tmp_path / "none", *own)
    assert " uint8" in stock and " on cpu by aot_eager, no plan" in stock
    for name, flags in {"level 1": ["--memory_opt_level", 1], "budget": ["--memory_opt_budget", "99%"]}.items():
        output, adapter = example(tmp_path / name, *own, *flags)
        assert f"on cpu by aot_eager, {name}" in output
        harness.assert_equal(Outcome([], adapter), Outcome([], expected))


@pytest.mark.nightly
def test_the_example_quantizes_its_own_model(tmp_path):
    output, adapter = example(tmp_path, "--memory_opt_level", 1)
    assert "float32 and uint8 and bfloat16 on cpu by aot_eager, level 1, in " in output
    # Two LoRA factors for each of seven linear layers in eight decoder layers.
    assert len(adapter) == 8 * 7 * 2 and any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    assert '"base_model_name_or_path": null' in (tmp_path / "adapter_config.json").read_text()
