"""Train a masked language model under a memory plan: on a dataset, on your own text, or on text from a pip package.
Trains and evaluates; with --do_train or --do_eval does only one of them."""

import math
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerBase, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.arguments import DataArguments, ModelArguments, TrainingArguments, parse
from common.data import load_rows, take
from common.models import load_model
from common.training import report, train_and_evaluate
from common.verses import prose
from optimum_memopt import MemOptError, MemOptTrainer, run


@dataclass
class MlmArguments(DataArguments):
    """The text to train on. The default is the World English Bible, one chapter per text."""

    mlm_probability: float = field(default=0.15, metadata={"help": "Share of the tokens that the model must predict."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise MemOptError(f"--mlm_probability must lie between 0 and 1, not be {self.mlm_probability}")


def text_column(rows: Dataset) -> str:
    """Returns the column named `text`, or the first one."""
    return "text" if "text" in rows.column_names else rows.column_names[0]


def blocks(rows: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Concatenate all texts, each with its special tokens, and cut them into blocks without padding."""
    column = text_column(rows)
    length = min(length, tokenizer.model_max_length)

    def cut(batch: dict[str, list]) -> dict[str, list]:
        # Not verbose: a text may be longer than the model's maximum, since it is cut below.
        encoded = tokenizer(batch[column], return_special_tokens_mask=True, verbose=False)
        joined = {name: list(chain.from_iterable(values)) for name, values in encoded.items()}
        whole = len(joined["input_ids"]) // length * length
        return {name: [tokens[i : i + length] for i in range(0, whole, length)] for name, tokens in joined.items()}

    return rows.map(cut, batched=True, remove_columns=rows.column_names, desc=f"Cutting into blocks of {length}")


def perplexity(metrics: dict[str, float], tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns the perplexity, with that of uniform guessing."""
    if "eval_loss" not in metrics:
        return {}
    value = math.exp(metrics["eval_loss"])
    return {"perplexity": f"{value:.1f} (a blind guess among all tokens: {len(tokenizer)})"}


def main() -> None:
    """Parse, load, train, evaluate, report."""
    model_args, data_args, training_args = parse(ModelArguments, MlmArguments, TrainingArguments, description=__doc__)
    set_seed(training_args.seed)
    splits = load_rows(data_args, prose)
    model, tokenizer = load_model(model_args, AutoModelForMaskedLM)
    with training_args.main_process_first(desc="tokenizing"):
        train = take(blocks(splits["train"], tokenizer, data_args.max_seq_length), data_args.max_train_samples)
        validation = take(
            blocks(splits["validation"], tokenizer, data_args.max_seq_length), data_args.max_eval_samples
        )
    trainer = MemOptTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=data_args.mlm_probability),
    )
    metrics = train_and_evaluate(trainer)
    report(trainer, perplexity(metrics, tokenizer))


if __name__ == "__main__":
    run(main)
