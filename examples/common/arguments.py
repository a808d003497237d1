"""Command-line arguments of the examples and their parser."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from transformers import HfArgumentParser

from optimum_memopt import MemOptError, MemOptTrainingArguments


@dataclass
class ModelArguments:
    """The model to train."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Model id on the Hugging Face hub, or a folder. Default: the model of the pip package."},
    )
    packaged_model: Literal["roberta", "deberta-v2"] = field(
        default="roberta",
        metadata={"help": "Without --model_name_or_path: the architecture to load the packaged MiniLM weights into."},
    )
    freeze_embeddings: bool = field(
        default=False, metadata={"help": "Freeze the word embeddings: half of a small model's parameters."}
    )


@dataclass
class RowArguments:
    """The rows for training and evaluation."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset on the Hugging Face hub, or a folder that `datasets` can load."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    train_file: str | None = field(default=None, metadata={"help": "Your own file with training data."})
    validation_file: str | None = field(
        default=None,
        metadata={"help": "Evaluation data in the same format. Default: 10%% of the training data is held out."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first N rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first N rows only."})
    split_seed: int = field(
        default=0, metadata={"help": "Seed for the held-out rows. Separate from --seed, so that runs stay comparable."}
    )

    def __post_init__(self) -> None:
        if self.validation_file and not self.train_file:
            raise MemOptError("--validation_file needs --train_file")
        if self.train_file and self.dataset_name:
            raise MemOptError("--train_file and --dataset_name exclude each other")
        _check_positive(self, "max_train_samples", "max_eval_samples")


@dataclass
class DataArguments(RowArguments):
    """The data to train on."""

    max_seq_length: int = field(
        default=128, metadata={"help": "Maximum number of tokens per row; longer texts are truncated."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "max_seq_length")


def _check_positive(arguments: object, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise MemOptError(f"--{name} must be at least 1, not {value}")


@dataclass
class TrainingArguments(MemOptTrainingArguments):
    """Training arguments with those of the memory plan."""

    # A recipe that falls back to plain PyTorch would not show a memory plan.
    ort_fallback: bool = field(
        default=False,
        metadata={
            "help": "Fall back to plain PyTorch, with a warning, when ONNX Runtime cannot train; default: stop."
        },
    )
    save_plan: str | None = field(
        default=None, metadata={"help": "Write the plan of the run to this file, for --memory_opt_plan."}
    )


def parse(*kinds: type, description: str) -> tuple:
    """Parse the command line into one object per dataclass; an unknown flag is a usage error."""
    parser = HfArgumentParser(kinds, description=description)
    *objects, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return tuple(objects)


@contextmanager
def loading(flag: str, value: str) -> Iterator[None]:
    """Turn a loading error into one line that names the flag."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MemOptError(f"{flag} {value}: {reason}") from error
