"""A dry run's patches to a Trainer, its models and text generation, by private names of transformers (5.23),
accelerate (1.15) and TRL (1.16).

A text of maximum length is generated with two forwards: of the prompt, and of the step that generates the last token
with a key-value cache of all tokens before it.
"""

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from optimum_memopt.compat.bitsandbytes import loads_quantized, quantize
from optimum_memopt.errors import MemOptError

# Arguments of a model's forward that grow with the text.
_GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_OF_DECODERS = ("decoder_attention_mask", "decoder_position_ids")
# TRL's (1.16) modules that call GPU kernels, and the functions that replace these kernels on other devices.
_TRL = ("kernels.chunked_logprob", "kernels.chunked_divergence", "trainer.utils", "trainer.distillation_trainer")
_TILES = ("_forward_tile", "_backward_tile", "_stats_tile", "_jsd_tile")


class _EndOfTextError(Exception):
    """Stops `generate()`: later forwards allocate nothing new and need real values."""


@dataclass
class Generation:
    """Sizes of the largest generation.

    Attributes:
        rows: rows of the key-value cache: one for each text, or for each beam of a text.
        length: tokens of a text, including its prompt.
    """

    rows: int = 0
    length: int = 0


@dataclass
class _Text:
    """A running generation.

    Attributes:
        rows: number of texts that it returns.
        length: tokens of a finished text, including its prompt.
        prompt: tokens of the prompt.
        forwards: number of forwards so far.
        arguments: arguments of the next forward, including the cache.
    """

    rows: int = 0
    length: int = 0
    prompt: int = 0
    forwards: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def grow(self, is_encoder_decoder: bool) -> None:
        """Skip to the forward of the last token but one, with all tokens before it in the cache."""
        before = self.length - 2
        cache = self.arguments.get("past_key_values")
        for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
            _grow_cache(layer, before)
        for name in _OF_DECODERS if is_encoder_decoder else _GROWING:
            value = self.arguments.get(name)
            if isinstance(value, torch.Tensor):
                self.arguments[name] = value.new_ones((*value.shape[:-1], before + 1))


def _grow_cache(layer: Any, tokens: int) -> None:
    """Resize a cache layer that grows by concatenation to that many tokens. Other kinds are allocated in full at the
    start."""
    from transformers.cache_utils import DynamicLayer

    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return
    if window := getattr(layer, "sliding_window", 0):
        layer.cumulative_length, tokens = tokens, min(tokens, window - 1)
    for name in ("keys", "values"):
        old = getattr(layer, name)
        shape = (*old.shape[:-2], tokens, old.shape[-1])
        # Drop the old tensor first, so that only one of the two is held.
        setattr(layer, name, None)
        setattr(layer, name, old.new_empty(shape))
        del old


def generate_next(trainer: Any, micro_batch: int) -> None:
    """Make a TRL (1.16) Trainer generate texts before this micro-batch of a step, counted from 0, if a real run may.

    If one generation covers fewer micro-batches than a step has, it also generates while gradients exist.
    """
    if hasattr(trainer, "_step"):
        args = trainer.args
        within_step = args.steps_per_generation * trainer.num_iterations < args.gradient_accumulation_steps
        if not micro_batch or within_step:
            trainer._step = 0


@contextmanager
def longest_generation(phase: Callable[[], AbstractContextManager[None]]) -> Iterator[Generation]:
    """Returns a context in which models generate texts of maximum length with two forwards: of the prompt, and of the
    last token with a key-value cache of all tokens before it. `generate` returns zeros. The context yields the sizes
    of the largest generation.

    Args:
        phase: returns a context to run each generation in.
    """
    from transformers import GenerationMixin

    kind: Any = GenerationMixin
    generate, prepare, update = (
        kind.generate,
        kind._prepare_generated_length,
        kind._update_model_kwargs_for_generation,
    )
    longest, texts = Generation(), list[_Text]()

    def generated(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        text = _Text()
        texts.append(text)
        try:
            with phase():
                generate(model, *args, **kwargs)
        except _EndOfTextError as error:
            # The error's frames hold the cache, and each other.
            traceback.clear_frames(error.__traceback__)
        finally:
            texts.pop()
        return torch.zeros((text.rows, text.length), dtype=torch.int64, device=model.device)

    def prepared(model: Any, generation_config: Any, **kwargs: Any) -> Any:
        config, text = prepare(model, generation_config=generation_config, **kwargs), texts[-1]
        texts_each, beams = config.num_return_sequences or 1, config.num_beams or 1
        text.rows = len(kwargs["inputs_tensor"]) * texts_each
        text.length, text.prompt = config.max_length, kwargs["input_ids_length"]
        longest.rows = max(longest.rows, len(kwargs["inputs_tensor"]) * max(texts_each, beams))
        longest.length = max(longest.length, text.length)
        return config

    def updated(model: Any, outputs: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        text = texts[-1]
        text.arguments = update(model, outputs, model_kwargs, *args, **kwargs)
        return text.arguments

    def has_more(model: Any, *_: Any, **__: Any) -> bool:
        text = texts[-1]
        text.forwards += 1
        # The prompt's forward has produced the first token.
        more = min(2, text.length - text.prompt)
        if text.forwards > more:
            raise _EndOfTextError
        if text.forwards == 2:
            text.grow(bool(model.config.is_encoder_decoder))
        return True

    replaced: dict[str, Any] = {
        "generate": generated,
        "_prepare_generated_length": prepared,
        "_update_model_kwargs_for_generation": updated,
        "_has_unfinished_sequences": has_more,
        "_beam_search_has_unfinished_sequences": lambda *_, **__: True,
    }
    with mock.patch.multiple(kind, **replaced), _no_stop_check():
        yield longest


@contextmanager
def _no_stop_check() -> Iterator[None]:
    """Returns a context in which `generate` never checks whether all texts have ended, since that reads values
    (transformers 5.23)."""
    from transformers.generation import utils

    # A Mock object would record its arguments, and so keep the cache alive.
    def no(*_: Any, **__: Any) -> bool:
        return False

    with ExitStack() as stack:
        if hasattr(utils, "StopCheck"):
            stack.enter_context(mock.patch.object(utils.StopCheck, "__call__", no))
            stack.enter_context(mock.patch.object(utils.DeferredStopCheck, "is_supported", no))
        yield


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Returns a context in which TRL's (1.16) losses take as much memory as with their GPU kernels, which compute in
    place."""

    def accumulate(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == torch.float32:
            acc.addmm_(a, b)

    def project(tile: Any, hidden: Any, weight: Any, bias: Any, start: int, end: int, dtype: Any) -> None:
        weight[start:end].to(dtype)

    nothing = dict.fromkeys(_TILES, lambda *_, **__: None)
    replaced = {**nothing, "_addmm_fp32": accumulate, "_project": project, "_use_triton": lambda _: False}
    with ExitStack() as stack:
        for name in _TRL:
            module: Any = sys.modules.get(f"trl.{name}")
            for each in filter(partial(hasattr, module), replaced):
                stack.enter_context(mock.patch.object(module, each, replaced[each]))
        yield


def run_instead_of_loop(trainer: Any, train: Callable[..., Any], loop: Callable[[], None]) -> None:
    """Run Trainer's `train`, with `loop` in place of its training loop. The code before the loop still runs: a new
    model from `model_init`, activation checkpointing, noise on embeddings (transformers 5.23)."""
    with mock.patch.object(trainer, "_inner_training_loop", side_effect=lambda *_, **__: loop()):
        train(trainer)


def prepared_for_training(trainer: Any) -> Any:
    """Returns the Trainer's model as accelerate wraps it, after the Trainer has created its optimizer and scheduler
    (transformers 5.23).

    accelerate (1.15) omits autocast to float16 if there is no GPU; here it is applied.
    """
    accelerator = trainer.accelerator
    accelerator.native_amp = accelerator.native_amp or accelerator.mixed_precision == "fp16"
    # Otherwise accelerate would move the model, whose tensors may have no data.
    accelerator.device_placement = False
    model, _ = trainer._prepare_for_training(1, None, None)
    return model


def items_in_batch(trainer: Any, batches: list[Any]) -> Any:
    """Returns the `num_items_in_batch` of a Trainer's training steps: the number of tokens with a label (transformers
    5.23)."""
    return trainer._get_num_items_in_batch(batches, trainer.args.device)


def clip_gradients(trainer: Any, model: Any) -> None:
    """Clip the gradients as Trainer's loop does (transformers 5.23)."""
    if trainer.args.max_grad_norm:
        trainer._clip_grad_norm(model)


@contextmanager
def alone() -> Iterator[None]:
    """Returns a context in which accelerate (1.15) gathers nothing from other processes, whose tensors may have no
    data either."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    with mock.patch.dict(PartialState._shared_state, distributed_type=DistributedType.NO, num_processes=1):
        yield


def set_generation_arguments(trainer: Any) -> None:
    """Set the arguments of `generate` as `evaluate` does before its first batch, if the Trainer has
    `--predict_with_generate` (transformers 5.23)."""
    args = trainer.args
    if getattr(args, "predict_with_generate", False):
        given = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
        trainer._gen_kwargs = {name: value for name, value in given.items() if value is not None}


# Arguments of `from_pretrained` that do not belong to the config: for building the model, and for loading its weights.
_OF_MODEL = ("attn_implementation", "experts_implementation")
_OF_LOADING = (
    "device_map",
    "low_cpu_mem_usage",
    "ignore_mismatched_sizes",
    "use_safetensors",
    "weights_only",
    "max_memory",
    "offload_folder",
    "key_mapping",
    "_from_auto",
    "adapter_kwargs",
    "tqdm_class",
)


@contextmanager
def models_without_weights() -> Iterator[None]:
    """Returns a context in which transformers builds models from their configs on the meta device, modules do not move
    between devices, and `--bf16` needs no GPU (transformers 5.23).

    Raises:
        MemOptError: in the context, for a model with quantized weights that bitsandbytes does not make.
    """
    from transformers import PretrainedConfig, PreTrainedModel, training_args
    from transformers.initialization import no_init_weights

    made, module = PreTrainedModel._from_config.__func__, torch.nn.Module
    moved = module.to

    def from_config(kind: Any, config: Any, **kwargs: Any) -> Any:
        # Tie weights here; otherwise the output layer would have weights of its own.
        with torch.device("meta"), no_init_weights():
            model = made(kind, config, **kwargs)
            model.tie_weights()
        return model

    def from_pretrained(kind: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        dtype, older = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
        quantization, info = kwargs.pop("quantization_config", None), kwargs.pop("output_loading_info", False)
        given = {key: kwargs.pop(key) for key in _OF_MODEL if key in kwargs}
        if not isinstance(config, PretrainedConfig):
            own = {key: value for key, value in kwargs.items() if key not in _OF_LOADING}
            config = kind.config_class.from_pretrained(name if config is None else config, **own)
        quantization = getattr(config, "quantization_config", None) if quantization is None else quantization
        loaded = None if quantization is None else loads_quantized(quantization)
        if quantization is not None and loaded is None:
            raise MemOptError(
                f"{name}: weights are quantized, which a dry run makes for BitsAndBytesConfig(load_in_4bit=True) and "
                "(load_in_8bit=True) alone"
            )
        dtype = dtype or older or "auto"
        dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
        config = copy.deepcopy(config)
        config.name_or_path = str(name)
        model = from_config(kind, config, dtype=dtype, **given).eval()
        if loaded is not None:
            quantize(model, loaded)
        return (model, {}) if info else model

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        # There are no weights; the config suffices to build the model again.
        self.config.save_pretrained(save_directory)

    def stays(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), None)
        return self if dtype is None else moved(self, dtype)

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (PreTrainedModel, "from_pretrained", classmethod(from_pretrained)),
        (PreTrainedModel, "_from_config", classmethod(from_config)),
        (PreTrainedModel, "save_pretrained", save_pretrained),
        (PreTrainedModel, "to", stays),
        (PreTrainedModel, "cuda", stays),
        (module, "to", stays),
        (module, "cuda", stays),
        (training_args, "is_torch_bf16_gpu_available", lambda: True),
    )
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def checked_arguments(check: Callable[[Any], None]) -> Iterator[None]:
    """Returns a context in which `check` is called with new TrainingArguments before they set up distributed training
    (transformers 5.23)."""
    from transformers import TrainingArguments

    before = TrainingArguments.__post_init__

    def checked(args: Any) -> None:
        check(args)
        before(args)

    with mock.patch.object(TrainingArguments, "__post_init__", checked):
        yield
