"""A tiny Trainer for the tests of the callbacks."""

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM, Trainer, TrainingArguments


@pytest.fixture
def trainer_of(tmp_path):
    def build(callbacks, trainer_class=Trainer, **arguments):
        torch.manual_seed(0)
        config = RobertaConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=20,
        )
        ids = torch.randint(3, 50, (8, 10))
        arguments = {"report_to": "none", "max_steps": 3, "save_strategy": "no", **arguments}
        return trainer_class(
            model=RobertaForMaskedLM(config),
            args=TrainingArguments(str(tmp_path / "run"), use_cpu=True, per_device_train_batch_size=2, **arguments),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            callbacks=callbacks,
        )

    return build
