"""sentence-transformers, Lightning, accelerate and Trainer's hyperparameter search: scripts with an engine against the
same scripts without one."""

import random
from pathlib import Path

import pytest
import torch
from transformers import BertModel, Trainer, TrainingArguments

from tests.rotation import nightly
from tests.train.trainers import harness
from tests.train.trainers.harness import Memopt, Outcome
from tests.trainer_runs import build, collate, rows

MODEL = "bert-classification"


def contrastive(folder: Path, memopt: Memopt) -> Outcome:
    """Train on anchor, positive and negative: three forwards of different lengths before one backward."""
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    BertModel(harness.bert_config()).save_pretrained(folder / "bert")
    harness.tokenizer().save_pretrained(folder / "bert")
    model = SentenceTransformer(
        modules=[Transformer(str(folder / "bert"), max_seq_length=32), Pooling(32)], device="cpu"
    )
    source = random.Random(0)
    triples = [{name: harness.sentence(source) for name in ("anchor", "positive", "negative")} for _ in range(24)]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=harness.arguments(SentenceTransformerTrainingArguments, folder / "run"),
        train_dataset=Dataset.from_list(triples),
        loss=MultipleNegativesRankingLoss(model),
    )
    return harness.trained(trainer, memopt)


def lightning(folder: Path, memopt: Memopt) -> Outcome:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(MODEL, num_hidden_layers=1)
            self.logs: list[dict[str, float]] = []
            memopt.optimize(self.model)

        def training_step(self, batch, _):
            loss = self.model(**batch).loss
            self.logs.append({"loss": loss.item()})
            return loss

        def validation_step(self, batch, _):
            self.logs.append({"eval_loss": self.model(**batch).loss.item()})

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    module = Classifier()
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    steps = {"accelerator": "cpu", "max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
    lightning.Trainer(default_root_dir=folder, **steps, **quiet).fit(module, loader(16), loader(6, seed=1))
    return Outcome(module.logs, harness.weights(module.model))


def accelerate_loop(folder: Path, memopt: Memopt) -> Outcome:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build(MODEL, num_hidden_layers=1)
    memopt.optimize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(16))
    logs = []
    for _ in range(2):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            logs.append({"loss": loss.item(), "norm": float(norm) if norm is not None else 0.0})
    accelerator.save_state(str(folder / "state"))
    files = sorted(path.name for path in (folder / "state").iterdir())
    return Outcome(logs, harness.weights(accelerator.unwrap_model(model)), {"files": files})


def search(folder: Path, memopt: Memopt) -> Outcome:
    optuna = pytest.importorskip("optuna")
    entries, trained = [], {}

    def objective(metrics: dict[str, float]) -> float:
        # Trainer releases the model at the end of the search.
        trained.update(harness.weights(trainer.model))
        entries.append(metrics)
        return metrics["eval_loss"]

    trainer = Trainer(
        model_init=lambda trial: build(MODEL, num_hidden_layers=1),
        args=harness.arguments(TrainingArguments, folder, eval_strategy="steps", eval_steps=2, max_steps=4),
        train_dataset=rows(MODEL),
        eval_dataset=rows(MODEL, 6, seed=1),
        data_collator=collate,
    )
    memopt.attach(trainer)
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True)},
        compute_objective=objective,
        n_trials=2,
        direction="minimize",
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    found = {"objective": best.objective, "run": best.run_id, **best.hyperparameters, "trials": len(entries)}
    return Outcome(harness.without_times([*trainer.state.log_history, *entries]), trained, found)


def loader(count: int, seed: int = 0) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows(MODEL, count, seed), batch_size=4, collate_fn=collate)


SCRIPTS = [contrastive, lightning, accelerate_loop, search]
# Without the search, which trains three times.
FAST = ["contrastive", "lightning", "accelerate_loop"]


@pytest.mark.parametrize("script", nightly(SCRIPTS, but=FAST))
@pytest.mark.parametrize("engine", ["compile", "ort"])
def test_as_without_an_engine(script, engine, stock, tmp_path):
    harness.check(script, stock, tmp_path, engine)
