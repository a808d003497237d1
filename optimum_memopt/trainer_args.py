"""`MemOptTrainingArguments`: Trainer's arguments and this package's flags in one dataclass for HfArgumentParser."""

from dataclasses import dataclass

from transformers import TrainingArguments

from optimum_memopt.distributed import check_world
from optimum_memopt.engines.shared.registry import create
from optimum_memopt.options import MemOptOptions, resolve


@dataclass
class MemOptTrainingArguments(MemOptOptions, TrainingArguments):
    """`transformers.TrainingArguments` with the options of `MemOptOptions`.

    Raises:
        MemOptError: at construction, if an option of this package is malformed or contradicts another one or
            DeepSpeed, or if this is one of several processes that would each train alone.
    """

    def __post_init__(self) -> None:
        self.check()
        super().__post_init__()
        check_world(self.world_size)
        if self.deepspeed_plugin is not None:
            # ZeRO 3 shards the weights while from_pretrained loads them, so checking in the Trainer would be too late.
            create(resolve(self)).check_arguments(self)
