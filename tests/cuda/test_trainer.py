import math
from pathlib import Path

import pytest
import torch
from gpu.steps import TINY, batch_of, build
from transformers import TrainerCallback

from optimum_memopt import MemOptTrainer, MemOptTrainingArguments
from optimum_memopt.engines.shared.forward_patch import ForwardState

STEPS, ACCUMULATION = 4, 2


class Reported(TrainerCallback):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_memopt_log(self, args, state, control, logs, **kwargs) -> None:
        self.names |= logs.keys()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("budget", [False, True], ids=["level", "budget"])
def test_a_run_with_everything(precision: str, budget: bool, tmp_path: Path) -> None:
    row = {name: tensor[0].cpu() for name, tensor in batch_of(TINY).items()}
    reported = Reported()
    args = MemOptTrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION},
        **{"per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 2, "max_grad_norm": 1.0},
        **{"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_loss": "plain"},
        **{"memory_opt_log_steps": 1, "log_input_density": True, "log_memory_phases": True},
        **{"memory_opt_log_file": str(tmp_path / "memopt.jsonl"), "report_to": [], precision: True},
        **({"memory_opt_budget": "1GiB"} if budget else {"memory_opt_level": 1}),
    )
    rows = [row] * (2 * ACCUMULATION * STEPS)
    trainer = MemOptTrainer(build("roberta", TINY, dropout=0.1), args, train_dataset=rows, callbacks=[reported])
    result = trainer.train()
    assert result.global_step == STEPS
    assert (trainer.accelerator.scaler is not None) == (precision == "fp16")
    assert any(name.endswith("post_backward/max_allocated_mib") for name in reported.names)
    assert any("density/" in name for name in reported.names)
    assert (tmp_path / "checkpoint-2").is_dir() and (tmp_path / "memopt.jsonl").stat().st_size > 0
    assert math.isfinite(trainer.memopt.measured_peak_mib)
    # Segments of other tests may remain, their allocations do not.
    assert trainer.memopt.measured_peak_mib == pytest.approx(trainer.memopt.plan_stats.predicted_peak_mib, rel=0.05)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == STEPS


class LossOfLogits(MemOptTrainer):
    """Computes the loss outside the model's forward, from ids that the simulation knows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten())
        return (loss, outputs) if return_outputs else loss


def test_a_loss_outside_of_the_forward_is_counted(tmp_path: Path) -> None:
    row = {name: tensor[0].cpu() for name, tensor in batch_of(TINY).items()}
    args = MemOptTrainingArguments(
        **{"output_dir": str(tmp_path), "max_steps": 2, "per_device_train_batch_size": 8, "save_strategy": "no"},
        **{"memory_opt_engine": "compile", "memory_opt_compiler": "aot_eager", "memory_opt_level": 1, "report_to": []},
    )
    trainer = LossOfLogits(build("roberta", TINY), args, train_dataset=[row] * 16)
    trainer.train()
    assert "not counted" not in str(trainer.memopt.table)
    assert trainer.memopt.measured_peak_mib == pytest.approx(trainer.memopt.plan_stats.predicted_peak_mib, rel=0.02)


def test_the_state_before_a_first_forward_takes_nothing_of_the_device() -> None:
    model = build("roberta", TINY).requires_grad_(False)
    held = torch.cuda.memory_allocated()
    state = ForwardState.of(model, with_buffers=True)
    assert torch.cuda.memory_allocated() == held
    state.restore()
    assert len(state.frozen) == len(list(model.parameters()))
