"""The longest text that a Trainer generates, on tensors without data: the prompt's forward, and that of the last
token, with the key-value cache of all before it. Private names of transformers (5.23) and TRL (1.16).
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

# Arguments of a model's forward that grow with the text.
_GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_OF_DECODERS = ("decoder_attention_mask", "decoder_position_ids")
# TRL's (1.16) modules that call kernels of a GPU, and what stands for these kernels elsewhere.
_TRL = ("kernels.chunked_logprob", "kernels.chunked_divergence", "trainer.utils", "trainer.distillation_trainer")
_TILES = ("_forward_tile", "_backward_tile", "_stats_tile", "_jsd_tile")


class _EndOfTextError(Exception):
    """The rest of a generation takes no memory, and reads values."""


@dataclass
class Generation:
    """The longest text that was generated.

    Attributes:
        rows: of the key-value cache: texts, and beams of each.
        length: tokens, those of the prompt among them.
    """

    rows: int = 0
    length: int = 0


@dataclass
class _Text:
    """A generation that runs.

    Attributes:
        rows: texts that are returned.
        length: tokens at the end, `prompt` of which are there at the beginning.
        forwards: that have run.
        arguments: of the next forward, the cache among them.
    """

    rows: int = 0
    length: int = 0
    prompt: int = 0
    forwards: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def grow(self, is_encoder_decoder: bool) -> None:
        """Let the last token but one be the next, with all before it in the cache."""
        before = self.length - 2
        cache = self.arguments.get("past_key_values")
        for layer in getattr(getattr(cache, "self_attention_cache", cache), "layers", ()):
            _grow_cache(layer, before)
        for name in _OF_DECODERS if is_encoder_decoder else _GROWING:
            value = self.arguments.get(name)
            if isinstance(value, torch.Tensor):
                self.arguments[name] = value.new_ones((*value.shape[:-1], before + 1))


def _grow_cache(layer: Any, tokens: int) -> None:
    """Give a layer of a cache that grows by concatenation n tokens. Others have their size from the beginning."""
    from transformers.cache_utils import DynamicLayer

    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return
    if window := getattr(layer, "sliding_window", 0):
        layer.cumulative_length, tokens = tokens, min(tokens, window - 1)
    for name in ("keys", "values"):
        old = getattr(layer, name)
        shape = (*old.shape[:-2], tokens, old.shape[-1])
        # Else both are there.
        setattr(layer, name, None)
        setattr(layer, name, old.new_empty(shape))
        del old


def generate_next(trainer: Any, micro_batch: int) -> None:
    """Have a Trainer of TRL (1.16) generate texts before a micro-batch of a step, counted from 0, where it may.

    With texts for fewer micro-batches than a step has, it generates while there are gradients, too.
    """
    if hasattr(trainer, "_step"):
        args = trainer.args
        within_step = args.steps_per_generation * trainer.num_iterations < args.gradient_accumulation_steps
        if not micro_batch or within_step:
            trainer._step = 0


@contextmanager
def longest_generation(phase: Callable[[], AbstractContextManager[None]]) -> Iterator[Generation]:
    """Within it models generate texts as long as they may be: from the prompt, and a last token with the key-value
    cache of all before it. They return zeros.

    Args:
        phase: is entered for each generation.
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
            # Whose frames hold the cache, and each other.
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
        # The prompt's forward has made the first token.
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
    """Nobody asks whether all texts have ended, which values say (transformers 5.23)."""
    from transformers.generation import utils

    # A mock would hold the cache, which it is given.
    def no(*_: Any, **__: Any) -> bool:
        return False

    with ExitStack() as stack:
        if hasattr(utils, "StopCheck"):
            stack.enter_context(mock.patch.object(utils.StopCheck, "__call__", no))
            stack.enter_context(mock.patch.object(utils.DeferredStopCheck, "is_supported", no))
        yield


@contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Within it TRL's (1.16) losses take the memory that their kernels take on a GPU, which compute in place."""

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
