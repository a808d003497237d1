"""`MemOptTrainingArguments`: Trainer's arguments and this package's flags in one dataclass for HfArgumentParser."""

from dataclasses import dataclass

from transformers import TrainingArguments

from optimum_memopt.options import MemOptOptions


@dataclass
class MemOptTrainingArguments(MemOptOptions, TrainingArguments):
    """`transformers.TrainingArguments` with the options of `MemOptOptions`.

    Raises:
        MemOptError: at construction, when an option of this package is malformed or contradicts another.
    """

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()
