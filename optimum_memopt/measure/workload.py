"""What is measured or estimated: a model built from its config, and a batch for it."""

import contextlib
import copy
import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optimum_memopt.errors import MemOptError, excerpt, path_excerpt
from optimum_memopt.measure.trainable import freeze_others

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

# Beyond it torch's operators index with more than 32 bits; far more than one step trains on.
_MOST_TOKENS = 2**31
# Several times what the largest models that can be traced have; building as many takes about a minute.
_MOST_MODULES = 20_000


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        model: a folder with a config.json, the path of one, a name on the hub, or a config. Weights are not read.
        task: a key of `TASKS`.
        batch_size: rows per step.
        seq_len: tokens per row, without padding; images have the size of their config.
        trainable: patterns of the parameters that train, see `measure.trainable`; empty: those that the model trains.
    """

    model: "str | PretrainedConfig"
    task: str
    batch_size: int = 8
    seq_len: int = 128
    trainable: tuple[str, ...] = ()

    def with_rows(self, rows: int) -> "Workload":
        """The same with another batch size."""
        return replace(self, batch_size=rows)

    @property
    def _named(self) -> str:
        """The model, for an error."""
        return f"--model {path_excerpt(self.model) if isinstance(self.model, str) else type(self.model).__name__}"

    @property
    def way_out(self) -> str:
        """What to do about a model that cannot be traced."""
        return "; --measure runs it"

    def check(self) -> None:
        """Check the arguments without importing anything heavy.

        Raises:
            MemOptError: an unknown task, no such folder or file, sizes below 1.
        """
        if self.task not in TASKS:
            near = difflib.get_close_matches(self.task, TASKS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise MemOptError(f"--task {excerpt(self.task) or repr(self.task)}: {hint}Allowed are {', '.join(TASKS)}")
        for name in ("batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise MemOptError(f"--{name} {getattr(self, name)}: allowed are numbers from 1 on")
        if self.batch_size * self.seq_len > _MOST_TOKENS:
            raise MemOptError(
                f"--batch_size {self.batch_size} --seq_len {self.seq_len}: allowed are up to {_MOST_TOKENS:,} tokens "
                "a step"
            )
        if not isinstance(self.model, str):
            return
        # Not `pathlib`, which raises for a name that is too long.
        if os.path.isdir(self.model) and not os.path.isfile(os.path.join(self.model, "config.json")):
            raise MemOptError(f"--model {path_excerpt(self.model)}: there is no config.json in this folder")
        # A name on the hub is "name" or "owner/name".
        is_path = os.path.isabs(self.model) or self.model.endswith(".json") or self.model.count("/") > 1
        if is_path and not os.path.exists(self.model):
            raise MemOptError(f"--model {path_excerpt(self.model)}: no such folder or config file")

    def load_config(self) -> "PretrainedConfig":
        """The model's config.

        Raises:
            MemOptError: neither a file nor the hub has a config that transformers can read.
        """
        from transformers import AutoConfig

        if not isinstance(self.model, str):
            # A model that is built of it may change it.
            return copy.deepcopy(self.model)
        try:
            return AutoConfig.from_pretrained(self.model)
        # A file may hold anything, and transformers validates only a part of it (5.23: `null` is a TypeError).
        except Exception as error:
            where = (
                "" if os.path.exists(self.model) else "neither a folder nor a file here, and no config from the hub: "
            )
            raise MemOptError(f"--model {path_excerpt(self.model)}: {where}{_reason(error)}") from error

    def build(self) -> tuple["torch.nn.Module", dict[str, "torch.Tensor"]]:
        """A model with random weights in training mode and a batch with labels, deterministic.

        Raises:
            MemOptError: the config does not fit the task, the sequences are longer than it allows, or a pattern
                matches no parameter.
        """
        import torch
        import transformers

        config = self.load_config()
        longest = getattr(config, "max_position_embeddings", None)
        if self.task != "image-classification" and longest is not None and self.seq_len > longest:
            raise MemOptError(f"--seq_len {self.seq_len}: this model has {longest} positions")
        torch.manual_seed(0)
        try:
            with _at_most(_MOST_MODULES):
                model = getattr(transformers, TASKS[self.task]).from_config(config)
            batch = self.batch_of(config)
        except MemOptError as error:
            raise MemOptError(f"{self._named}: {error}") from error
        # A config whose numbers contradict each other fails anywhere in the model's code.
        except Exception as error:
            line = f"{self._named}: no model can be built from its config: {_reason(error)}"
            if "Unrecognized configuration class" in str(error):
                line = f"--task {self.task}: transformers has no {config.model_type} model for it"
            raise MemOptError(line) from error
        # Within `no_init_weights` an output layer has weights of its own.
        model.tie_weights()
        freeze_others(model, self.trainable)
        decide_problem_type(model.config, batch.get("labels"))
        return model.train(), batch

    def batch_of(self, config: Any) -> dict[str, "torch.Tensor"]:
        """A batch with labels for a model with this config."""
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


def decide_problem_type(config: Any, labels: "torch.Tensor | None") -> None:
    """Set the problem type where each row has one class as its label: DeBERTa's forward reads the labels otherwise."""
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        return
    if getattr(config, "problem_type", None) is None:
        config.problem_type = "single_label_classification"


@contextlib.contextmanager
def _at_most(modules: int) -> Iterator[None]:
    """Refuse a model with more modules while it is built, which may take hours.

    Raises:
        MemOptError: from within.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > modules:
            raise MemOptError(f"its config asks for more than {modules:,} modules; larger models are not measured")

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def _reason(error: Exception) -> str:
    """An error in one short line."""
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return kind + excerpt(" ".join(str(error).split()), longest=300)


def _tokens(config: Any, rows: int, length: int) -> "torch.Tensor":
    """Ids without padding, which position ids and masks treat differently."""
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
