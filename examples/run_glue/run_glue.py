"""Fine-tune a text classifier under a memory plan: on a GLUE task, on your own data, or on sentence pairs from a pip
package. Trains and evaluates; with --do_train or --do_eval does only one of them."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import DataArguments, ModelArguments, TrainingArguments, loading, parse
from common.data import load_rows, take
from common.models import load_model
from common.training import report, train_and_evaluate
from common.verses import verse_pairs
from optimum_memopt import MemOptError, MemOptTrainer, run

GlueTask = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
GLUE_HUB_ID = "nyu-mll/glue"


@dataclass
class GlueArguments(DataArguments):
    """The sentences to classify. The default is pairs of Bible verses from two translations, with label 1 for the same
    verse and 0 for neighbouring ones."""

    task_name: GlueTask | None = field(default=None, metadata={"help": "A GLUE task from the Hugging Face hub."})
    pad_to_max_length: bool = field(
        default=False,
        metadata={"help": "Pad every row to --max_seq_length instead of to the longest row of its batch."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_name and (self.dataset_name or self.train_file):
            raise MemOptError("--task_name excludes --dataset_name and --train_file")


@dataclass(frozen=True)
class Task:
    """A task: its text columns and its classes (None for regression)."""

    columns: list[str]
    classes: list | None
    encoded: bool = False

    def model_config(self) -> dict:
        """Returns the part of a model's configuration that depends on the task."""
        if self.classes is None:
            return {"num_labels": 1, "problem_type": "regression"}
        names = [str(name) for name in self.classes]
        return {
            "num_labels": len(names),
            "problem_type": "single_label_classification",
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }

    def label_ids(self, values: list) -> list:
        """Convert labels to the form that the model expects."""
        if self.classes is None:
            return [float(value) for value in values]
        if self.encoded:
            return values
        try:
            return [self.classes.index(value) for value in values]
        except ValueError as error:
            raise MemOptError(f"a label of the evaluation rows is not among those of training: {error}") from error


def load_splits(args: GlueArguments) -> DatasetDict:
    """Load the GLUE task or the data that the arguments name, or else the verse pairs."""
    if args.task_name is None:
        return load_rows(args, verse_pairs)
    with loading("--task_name", args.task_name):
        return load_dataset(GLUE_HUB_ID, args.task_name)


def describe(rows: Dataset) -> Task:
    """Infer the task from the rows: the first one or two text columns, and a column named `label`."""
    if "label" not in rows.features:
        raise MemOptError(f"the data needs a column named label; it has {', '.join(rows.column_names)}")
    texts = [
        name
        for name, feature in rows.features.items()
        if name != "label" and isinstance(feature, Value) and feature.dtype.endswith("string")
    ]
    if not texts:
        raise MemOptError(f"the data needs a text column; it has {', '.join(rows.column_names)}")
    label = rows.features["label"]
    if isinstance(label, ClassLabel):
        return Task(texts[:2], label.names, encoded=True)
    if label.dtype.startswith("float"):
        return Task(texts[:2], None)
    return Task(texts[:2], sorted(rows.unique("label")))


def encode(rows: Dataset, task: Task, tokenizer: PreTrainedTokenizerBase, args: GlueArguments) -> Dataset:
    """Tokenize the rows."""

    def features(batch: dict[str, list]) -> dict[str, list]:
        encoded = tokenizer(
            *(batch[column] for column in task.columns),
            max_length=min(args.max_seq_length, tokenizer.model_max_length),
            truncation=True,
            padding="max_length" if args.pad_to_max_length else False,
        )
        return {**encoded, "labels": task.label_ids(batch["label"])}

    return rows.map(features, batched=True, remove_columns=rows.column_names, desc="Tokenizing")


def metrics_for(args: GlueArguments, task: Task) -> Callable[[EvalPrediction], dict[str, float]]:
    """Returns GLUE's metrics: correlations for regression, Matthews for CoLA, otherwise accuracy and F1."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        scores = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        truth = prediction.label_ids
        if task.classes is None:
            scores = scores.squeeze(-1)
            return {"pearson": pearsonr(scores, truth)[0], "spearman": spearmanr(scores, truth)[0]}
        chosen = scores.argmax(-1)
        result = {"accuracy": float(np.mean(chosen == truth))}
        if args.task_name == "cola":
            return {**result, "matthews": matthews_corrcoef(truth, chosen)}
        return {**result, "f1": f1_score(truth, chosen, average="binary" if len(task.classes) == 2 else "macro")}

    return compute


def accuracies(metrics: dict[str, float], validation: dict[str, Dataset]) -> dict[str, str]:
    """Returns each accuracy, with that of always predicting the most frequent class."""
    results = {}
    for name, rows in validation.items():
        key = f"eval_{name}_accuracy" if len(validation) > 1 else "eval_accuracy"
        if key in metrics:
            majority = max(Counter(rows["labels"]).values()) / len(rows)
            title = " ".join(["accuracy", *name.split("_")[1:]])
            results[title] = f"{metrics[key]:.3f} on {len(rows)} held-out rows (majority class {majority:.3f})"
    return results


def main() -> None:
    """Parse, load, train, evaluate, report."""
    model_args, data_args, training_args = parse(ModelArguments, GlueArguments, TrainingArguments, description=__doc__)
    set_seed(training_args.seed)
    splits = load_splits(data_args)
    task = describe(splits["train"])
    model, tokenizer = load_model(model_args, AutoModelForSequenceClassification, **task.model_config())
    with training_args.main_process_first(desc="tokenizing"):
        train = encode(take(splits["train"], data_args.max_train_samples), task, tokenizer, data_args)
        # MNLI has two evaluation sets: matched and mismatched genres.
        validation = {
            name: encode(take(rows, data_args.max_eval_samples), task, tokenizer, data_args)
            for name, rows in splits.items()
            if name.startswith("validation")
        }
    trainer = MemOptTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation if len(validation) > 1 else validation["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=metrics_for(data_args, task),
    )
    metrics = train_and_evaluate(trainer)
    report(trainer, accuracies(metrics, validation))


if __name__ == "__main__":
    run(main)
