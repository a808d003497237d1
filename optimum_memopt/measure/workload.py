"""A model from its config alone, and a batch for it: what a measurement trains."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum_memopt.errors import MemOptError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# Task, by the hub's name, to the class of transformers that has the head for it.
TASKS = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: a folder with a config.json, the path of one, or a name on the hub. Weights are not read.
        task: a key of `TASKS`.
        batch_size: rows a step.
        seq_len: tokens a row, none of them padding; images have the size of their config.
    """

    model: str
    task: str
    batch_size: int = 8
    seq_len: int = 128

    def check(self) -> None:
        """Find what is wrong before anything heavy is imported.

        Raises:
            MemOptError: an unknown task, no such folder or file, sizes below 1.
        """
        if self.task not in TASKS:
            near = difflib.get_close_matches(self.task, TASKS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise MemOptError(f"--task {self.task}: {hint}Allowed are {', '.join(TASKS)}")
        for name in ("batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise MemOptError(f"--{name} {getattr(self, name)}: allowed are numbers from 1 on")
        path = Path(self.model)
        if path.is_dir() and not (path / "config.json").is_file():
            raise MemOptError(f"--model {self.model}: there is no config.json in this folder")
        # A name on the hub is "name" or "owner/name".
        if not path.exists() and (path.is_absolute() or path.suffix == ".json" or self.model.count("/") > 1):
            raise MemOptError(f"--model {self.model}: no such folder or config file")

    def load_config(self) -> "PretrainedConfig":
        """The model's config.

        Raises:
            MemOptError: neither a file nor the hub has one that transformers understands.
        """
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.model)
        except (OSError, ValueError, KeyError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise MemOptError(
                f"--model {self.model}: neither a folder nor a file here, and no config from the hub: {reason}"
                if not Path(self.model).exists()
                else f"--model {self.model}: {reason}"
            ) from error

    def build(self) -> tuple["torch.nn.Module", dict[str, "torch.Tensor"]]:
        """A model with random weights in training mode and a batch with labels, the same at every call.

        Raises:
            MemOptError: the config is not one for this task, or the rows are longer than it allows.
        """
        import torch
        import transformers

        config = self.load_config()
        longest = getattr(config, "max_position_embeddings", None)
        if self.task != "image-classification" and longest is not None and self.seq_len > longest:
            raise MemOptError(f"--seq_len {self.seq_len}: this model has {longest} positions")
        torch.manual_seed(0)
        try:
            model = getattr(transformers, TASKS[self.task]).from_config(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise MemOptError(f"--task {self.task}: transformers has no {config.model_type} model for it") from error
        return model.train(), self._batch(config)

    def _batch(self, config: Any) -> dict[str, "torch.Tensor"]:
        import torch

        if self.task == "image-classification":
            size, channels = config.image_size, getattr(config, "num_channels", 3)
            height, width = (size, size) if isinstance(size, int) else size
            pixels = torch.rand(self.batch_size, channels, height, width)
            return {"pixel_values": pixels, "labels": _classes(config, self.batch_size)}
        ids = _tokens(config, self.batch_size, self.seq_len)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.task == "question-answering":
            positions = torch.zeros(self.batch_size, dtype=torch.long)
            return {**batch, "start_positions": positions, "end_positions": positions.clone()}
        if self.task == "text-classification":
            return {**batch, "labels": _classes(config, self.batch_size)}
        if self.task == "token-classification":
            return {**batch, "labels": torch.randint(0, config.num_labels, ids.shape)}
        return {**batch, "labels": ids.clone()}


def _tokens(config: Any, rows: int, length: int) -> "torch.Tensor":
    """Ids that are never padding, which position ids and masks treat differently."""
    import torch

    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    if padding is None:
        return torch.randint(0, text.vocab_size, (rows, length))
    ids = torch.randint(0, text.vocab_size - 1, (rows, length))
    return ids + (ids >= padding)


def _classes(config: Any, rows: int) -> "torch.Tensor":
    import torch

    # transformers takes a single label for a regression.
    return torch.rand(rows) if config.num_labels == 1 else torch.randint(0, config.num_labels, (rows,))
