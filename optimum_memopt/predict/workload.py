"""Workloads: a model from its config or as a module, with a batch, the trained parameters, and PEFT's adapter."""

import bisect
import contextlib
import copy
import difflib
import fnmatch
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from optimum_memopt.compat.bitsandbytes import copy_state, is_quantized, moved_to_states, statistics_of
from optimum_memopt.compat.torch import dtype_name, tensors_in, without_modes
from optimum_memopt.compat.transformers import torch_init
from optimum_memopt.engines.api.predictions import PlannedDevice
from optimum_memopt.engines.shared.in_place import engine_of
from optimum_memopt.errors import MemOptError, excerpt, listing, path_excerpt
from optimum_memopt.logs import get_logger
from optimum_memopt.predict.adapter import parse_adapter, parse_quantization, quantized, with_adapter
from optimum_memopt.step_settings import COUNTS, MEASURED, ModelSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_NUMBER = re.compile(r"\.\d+(?=\.|$)")
# Maximum characters of the parameter names that an error shows.
_SHOWN = 150


def freeze_others(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters that no pattern matches, and unfreeze the others; without patterns nothing is changed.

    Raises:
        MemOptError: a pattern matches nothing; names available parameters.
    """
    if not patterns:
        return
    # A tied parameter has several names.
    named = list(model.named_parameters(remove_duplicate=False))
    trained = set()
    for pattern in patterns:
        matching = {id(parameter) for name, parameter in named if matches(pattern, name)}
        if not matching:
            raise MemOptError(_nothing(pattern, type(model).__name__, [name for name, _ in named]))
        trained |= matching
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in trained)


def matches(pattern: str, name: str) -> bool:
    """True if a pattern matches a parameter.

    Args:
        pattern: one or more adjacent parts of the name, such as `query` or `attention.self.query`, as in PEFT's
            `target_modules`; or a glob or a regular expression for the whole name.
        name: full name, such as `roberta.encoder.layer.0.attention.self.query.weight`.
    """
    if f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def _nothing(pattern: str, model: str, names: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(_NUMBER.sub(".*", name) for name in names))
    parts = dict.fromkeys(part for kind in kinds for part in kind.split("."))
    near = difflib.get_close_matches(pattern, parts, n=1, cutoff=0.6)
    ends = list(itertools.accumulate(len(kind) + 2 for kind in kinds))
    shown = kinds[: max(1, bisect.bisect(ends, _SHOWN))]
    more = ", …" if len(shown) < len(kinds) else ""
    return (
        f"--trainable {excerpt(pattern) or repr(pattern)}: no parameter of {model} has this name; "
        f"{listing('available', ', '.join(shown) + more, near)}"
    )


# From the hub's name of a task to the transformers class with its head.
TASKS = {
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}

# Suffixes of transformers' class names.
_HEADS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForConditionalGeneration": "text2text-generation",
    "ForImageClassification": "image-classification",
}


def task_of(classes: Sequence[str]) -> str:
    """Returns the task of the first class whose name tells it.

    Raises:
        MemOptError: no class name tells it.
    """
    for name in classes:
        for end, task in _HEADS.items():
            if name.endswith(end):
                return task
    named = f"{', '.join(classes)} does not imply it" if classes else "the config names no class that implies it"
    raise MemOptError(f"task: {named}; give one of {', '.join(TASKS)}")


# Number of ids for models without a vocabulary, which read characters (CANINE).
_CHARACTERS = 256
# With more tokens torch's operators index with more than 32 bits; far more than one step trains on.
_MOST_TOKENS = 2**31
# Several times as many as the largest traceable models have; building this many takes about a minute.
_MOST_MODULES = 20_000


@dataclass(frozen=True)
class Workload(ModelSettings):
    """A model from its config, and the batch that it trains on.

    Attributes:
        model: a folder, a name on the hub, or a config; weights are not read.
        task: a key of `TASKS`.
        trainable: patterns of the trained parameters, see `matches`.
        padding: whether some row of a batch is shorter than others.
        peft: PEFT's config, see `parse_adapter`.
        quantize: quantization of the weights, see `parse_quantization`.
    """

    def with_rows(self, rows: int) -> "Workload":
        return replace(self, batch_size=rows)

    def checked(self) -> "Workload":
        """Returns the checked workload; a missing task is taken from the class that the config names.

        Raises:
            MemOptError: see `check`; or the config cannot be read, or names no class that tells the task.
        """
        if self.task is not None:
            self.check()
            return self
        replace(self, task=next(iter(TASKS))).check()
        return replace(self, task=task_of(getattr(self.load_config(), "architectures", None) or ()))

    @property
    def weights_dtype(self) -> str:
        """Returns the dtype of the weights and its source, such as `bfloat16 by its config`."""
        if self.dtype:
            return self.dtype
        of_config = getattr(self.load_config(), "dtype", None)
        return f"{str(of_config).removeprefix('torch.')} by its config" if of_config else "float32 by default"

    @property
    def dtypes(self) -> set[str]:
        """Returns the dtypes of the weights."""
        return {self.weights_dtype.partition(" ")[0]}

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Returns inputs with known values that models branch on; a mask without known values is assumed to have
        padding."""
        if self.padding or not self.tokens:
            return {}
        return {"attention_mask": torch.ones(self.batch_size, self.seq_len, dtype=torch.int64)}

    @property
    def _named(self) -> str:
        return f"--model {path_excerpt(self.model) if isinstance(self.model, str) else type(self.model).__name__}"

    @property
    def tokens(self) -> int:
        """Returns the tokens of a row; 0 for images."""
        return 0 if self.task == "image-classification" else self.seq_len

    @property
    def suggestion(self) -> str:
        """Returns a hint on how to get figures for a model that cannot be traced; empty if it cannot be measured."""
        settings = (field for field in fields(ModelSettings) if field.name not in MEASURED)
        is_measured = all(getattr(self, field.name) == field.default for field in settings)
        return "; optimum-cli memopt plan --measure runs it" if is_measured else ""

    def check(self) -> None:
        """Check the arguments without importing anything heavy.

        Raises:
            MemOptError: an unknown task, a missing folder or file, or a size below 1.
        """
        if self.task not in TASKS:
            near = difflib.get_close_matches(str(self.task), TASKS, n=1, cutoff=0.5)
            tasks = listing("allowed", ", ".join(TASKS), near)
            raise MemOptError(f"--task {excerpt(self.task) or repr(self.task)}: {tasks}")
        for name in ("batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise MemOptError(f"--{name} {getattr(self, name)}: allowed: {COUNTS}")
        if self.batch_size * self.seq_len > _MOST_TOKENS:
            raise MemOptError(
                f"--batch_size {self.batch_size} --seq_len {self.seq_len}: allowed: up to {_MOST_TOKENS:,} tokens "
                "per step"
            )
        for setting in fields(self):
            allowed, value = setting.metadata.get("allowed"), getattr(self, setting.name)
            if allowed and value is not None and value not in allowed:
                raise MemOptError(f"--{setting.name} {excerpt(value) or repr(value)}: allowed: {', '.join(allowed)}")
        if self.peft is not None:
            parse_adapter(self.peft)
        if self.quantize is not None:
            parse_quantization(self.quantize)
            if not self.peft:
                raise MemOptError(
                    f"--quantize {excerpt(self.quantize)}: quantized weights do not train; add an adapter, such as "
                    "--peft r=16,target=all-linear"
                )
        if not isinstance(self.model, str):
            return
        # os.path instead of pathlib, which raises for a name that is too long.
        if os.path.isdir(self.model) and not os.path.isfile(os.path.join(self.model, "config.json")):
            raise MemOptError(f"--model {path_excerpt(self.model)}: there is no config.json in this folder")
        # A name on the hub is "name" or "owner/name".
        is_path = os.path.isabs(self.model) or self.model.endswith(".json") or self.model.count("/") > 1
        if is_path and not os.path.exists(self.model):
            raise MemOptError(f"--model {path_excerpt(self.model)}: no such folder or config file")

    def load_config(self) -> "PretrainedConfig":
        """Returns the model's config.

        Raises:
            MemOptError: neither a file nor the hub has a config that transformers can read.
        """
        from transformers import AutoConfig

        if not isinstance(self.model, str):
            # Building a model may change its config.
            return copy.deepcopy(self.model)
        try:
            return AutoConfig.from_pretrained(self.model)
        # A file may hold anything, and transformers validates only a part of it (5.23: `null` is a TypeError).
        except Exception as error:
            where = (
                "" if os.path.exists(self.model) else "neither a folder nor a file here, and no config from the hub: "
            )
            raise MemOptError(f"--model {path_excerpt(self.model)}: {where}{_reason(error)}") from error

    def build(self) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """Returns a model in training mode with random weights, and a batch with labels; both are deterministic.

        Raises:
            MemOptError: the config does not fit the task, the sequences are longer than it allows, or a pattern
                matches no parameter.
        """
        import transformers

        config = self.load_config()
        longest = getattr(config, "max_position_embeddings", None)
        # XLNet has -1: any length.
        if self.task != "image-classification" and longest is not None and 0 < longest < self.seq_len:
            raise MemOptError(f"--seq_len {self.seq_len}: this model has {longest} positions")
        torch.manual_seed(0)
        try:
            with _at_most(_MOST_MODULES):
                model = self._model_of(getattr(transformers, TASKS[str(self.task)]), config)
            batch = self.batch_of(config)
        except MemOptError as error:
            raise MemOptError(f"{self._named}: {error}") from error
        # A config whose numbers contradict each other fails anywhere in the model's code.
        except Exception as error:
            line = f"{self._named}: no model can be built from its config: {_reason(error)}"
            if "Unrecognized configuration class" in str(error):
                line = f"--task {self.task}: transformers has no {config.model_type} model for it{_way_of(config)}"
            raise MemOptError(line) from error
        decide_problem_type(model.config, batch.get("labels"))
        _decide_first_token(model.config)
        freeze_others(model, self.trainable)
        return model.train(), batch

    def _model_of(self, kind: Any, config: Any) -> torch.nn.Module:
        given = {"dtype": self.dtype and getattr(torch, self.dtype), "attn_implementation": self.attention}
        given = {name: value for name, value in given.items() if value}
        if not self.peft:
            model = kind.from_config(config, **given)
            # Within `no_init_weights` an output layer is not tied to the embeddings.
            model.tie_weights()
            return model
        # PEFT moves its new parameters to the model's device, which fails for fake parameters.
        with without_modes(), torch.device("meta"):
            model = kind.from_config(config, **given)
            model.tie_weights()
            if self.quantize:
                model = quantized(model, parse_quantization(self.quantize))
            with torch_init():
                model = with_adapter(model, parse_adapter(self.peft))
        return _without_data(model)

    def batch_of(self, config: Any) -> dict[str, torch.Tensor]:
        """Returns a batch with labels for a model with this config."""
        if self.task == "image-classification":
            # CLIP has the image size in its vision config.
            vision = getattr(config, "vision_config", config)
            size, channels = vision.image_size, getattr(vision, "num_channels", 3)
            height, width = (size, size) if isinstance(size, int) else size
            pixels = torch.rand(self.batch_size, channels, height, width)
            return {"pixel_values": pixels, "labels": _classes(config, self.batch_size)}
        ids = _tokens(config, self.batch_size, self.seq_len)
        mask = torch.ones_like(ids)
        if self.padding:
            mask[-1:, -1:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.task == "question-answering":
            positions = torch.zeros(self.batch_size, dtype=torch.long)
            return {**batch, "start_positions": positions, "end_positions": positions.clone()}
        if self.task == "text-classification":
            return {**batch, "labels": _classes(config, self.batch_size)}
        if self.task == "token-classification":
            return {**batch, "labels": torch.randint(0, config.num_labels, ids.shape)}
        return {**batch, "labels": ids.clone()}


def decide_problem_type(config: Any, labels: torch.Tensor | None) -> None:
    """Set the problem type if each row's label is one class; otherwise DeBERTa's forward reads the labels' values."""
    if labels is None or labels.dim() != 1 or labels.is_floating_point():
        return
    if getattr(config, "problem_type", None) is None:
        config.problem_type = "single_label_classification"


def _decide_first_token(config: Any) -> None:
    """Set the decoder's start token if the config lacks it, as `T5Config()` does; it does not affect memory."""
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


@contextlib.contextmanager
def _at_most(modules: int) -> Iterator[None]:
    """Limit the number of modules of a model that is built in this context; building more may take hours.

    Raises:
        MemOptError: inside the context, at the first module beyond the limit.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def registered(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > modules:
            raise MemOptError(f"its config requests more than {modules:,} modules; larger models are not measured")

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    return kind + excerpt(" ".join(str(error).split()), longest=300)


def _way_of(config: Any) -> str:
    """Returns a hint on how to get figures for a model with images in its texts, whose sizes depend on its data; empty
    for other models."""
    if not hasattr(config, "vision_config"):
        return ""
    return "; optimum-cli memopt dry-run --device h100 my_script.py predicts a script's own batch of images and texts"


def _tokens(config: Any, rows: int, length: int) -> torch.Tensor:
    """Returns random ids other than the padding id, for which position ids differ."""
    text = config.get_text_config()
    padding, vocabulary = getattr(text, "pad_token_id", None), getattr(text, "vocab_size", _CHARACTERS)
    if padding is None:
        return torch.randint(0, vocabulary, (rows, length))
    ids = torch.randint(0, vocabulary - 1, (rows, length))
    return ids + (ids >= padding)


def _classes(config: Any, rows: int) -> torch.Tensor:
    # transformers treats a single label as regression.
    return torch.rand(rows) if config.num_labels == 1 else torch.randint(0, config.num_labels, (rows,))


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class ModuleWorkload:
    """A module, and the batch that it trains on.

    Attributes:
        module: the module, on any device including the meta device.
        inputs: keyword arguments of its forward; tensors may be on any device.
        batch_size: rows of a batch; the first dimension of all inputs with as many rows as the first tensor.
        trainable: patterns of the trained parameters, see `matches`.
    """

    module: torch.nn.Module = field(repr=False)
    inputs: Mapping[str, Any] = field(repr=False)
    batch_size: int
    trainable: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, module: torch.nn.Module, inputs: object, batch_size: int | None, trainable: tuple[str, ...]
    ) -> "ModuleWorkload":
        """Returns the workload of a module and example inputs, checked.

        Args:
            inputs: a mapping of keyword arguments, a sequence of positional ones, or a tensor.
            batch_size: rows of a batch; None: the rows of the first tensor.

        Raises:
            MemOptError: the forward does not take the inputs, no input tensor has rows, or the module cannot be
                planned.
        """
        name = type(module).__name__
        if engine_of(module) is not None:
            raise MemOptError(f"{name} is being trained by an engine; detach() it, or ask trainer.memopt")
        for path, tensor in _tensors(module):
            if type(tensor) not in _PLAIN and not is_quantized(tensor):
                raise MemOptError(f"{name}: {path} is a {type(tensor).__name__}; only plain tensors can be planned")
        keywords = _keywords(module, inputs)
        first = next((value for value in tensors_in(keywords) if value.dim()), None)
        if first is None:
            raise MemOptError("example_inputs: none of them is a tensor with a first dimension, the rows of a batch")
        rows = first.shape[0] if batch_size is None else batch_size
        if rows < 1:
            raise MemOptError(f"batch_size={rows}: allowed: {COUNTS}")
        return cls(module, _resized(keywords, first.shape[0], rows), rows, trainable)

    @property
    def dtypes(self) -> set[str]:
        """Returns the dtypes of the weights."""
        return {dtype_name(parameter.dtype) for parameter in self.module.parameters()}

    @property
    def tokens(self) -> int:
        """Returns 0: the tokens of a row are taken from the inputs."""
        return 0

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """Returns inputs whose values are known: tensors not on the meta device."""
        tensors = {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        return {name: tensor for name, tensor in tensors.items() if tensor.device.type != "meta"}

    @property
    def suggestion(self) -> str:
        """Returns an empty text: there is no hint for modules."""
        return ""

    def with_rows(self, rows: int) -> "ModuleWorkload":
        return replace(self, inputs=_resized(self.inputs, self.batch_size, rows), batch_size=rows)

    def build(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        """Returns a copy of the module in training mode, and its inputs, as fake tensors on the default device.

        Raises:
            MemOptError: the module cannot be copied, or a pattern matches no parameter.
        """
        model = _without_data(self.module)
        freeze_others(model, self.trainable)
        batch = {name: _mapped(_fake, value) for name, value in self.inputs.items()}
        if isinstance(labels := batch.get("labels"), torch.Tensor) and hasattr(model, "config"):
            decide_problem_type(model.config, labels)
        return model.train(), batch


def warn_of_precision(device: PlannedDevice, autocast: str, workload: Workload | ModuleWorkload) -> None:
    """Log a warning if a device does not compute in the dtype of the weights or of autocast."""
    for dtype in device.lacks:
        if dtype == autocast or dtype in workload.dtypes:
            given = f"autocast to {dtype}" if dtype == autocast else f"weights in {dtype}"
            get_logger().warning(
                f"{given} on {device.name}: this device computes {dtype} in float32, which is slow, and inductor does "
                "not compile it; use fp16, with weights in float32"
            )


def _without_data(module: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy of a module with new tensors on the default device; they are fake in a fake tensor mode.

    Raises:
        MemOptError: the module cannot be copied.
    """
    tensors = [tensor for _, tensor in _tensors(module)]
    try:
        held = (each for tensor in tensors for each in (tensor, *statistics_of(tensor)))
        memo: dict[int, Any] = {id(each): _fake(each) for each in held}
        for tensor in tensors:
            copy_state(tensor, memo[id(tensor)], memo)
        for tensor, is_weight, weight in moved_to_states(module):
            memo[id(tensor)] = memo[id(weight)].detach() if is_weight else _fake(tensor)
        return copy.deepcopy(module, memo)
    # Any object in the module may fail to be copied.
    except Exception as error:
        raise MemOptError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: "
            f"{excerpt(' '.join(str(error).split()), longest=200)})"
        ) from error


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters, buffers, and tensors in plain attributes or lists of modules, with their paths."""
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            for leaf in tensors_in(value):
                yield f"{name}.{key}".strip("."), leaf


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor like `tensor` on the default device; it is fake in a fake tensor mode."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


def _keywords(module: torch.nn.Module, inputs: object) -> dict[str, Any]:
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, Mapping | Sequence):
        raise MemOptError(f"example_inputs: a dict, a tuple or a tensor, not {excerpt(type(inputs).__name__)}")
    forward = f"example_inputs: forward of {type(module).__name__}"
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    except TypeError as error:
        raise MemOptError(f"{forward}: {error}") from error
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if any(signature.parameters[name].kind not in _NAMED for name in bound.arguments):
        raise MemOptError(f"{forward} takes arguments without names, which cannot be planned")
    return dict(bound.arguments)


def _resized(inputs: Mapping[str, Any], before: int, rows: int) -> dict[str, Any]:
    def resized(value: torch.Tensor) -> torch.Tensor:
        if rows == before or not value.dim() or value.shape[0] != before:
            return value
        return torch.empty((rows, *value.shape[1:]), dtype=value.dtype, device="meta").requires_grad_(
            value.requires_grad
        )

    return {name: _mapped(resized, value) for name, value in inputs.items()}


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns a value with its tensors changed, also those in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(change, each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, each) for each in value)
    return value
