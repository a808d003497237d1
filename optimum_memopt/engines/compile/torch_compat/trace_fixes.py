"""Avoids graph breaks and recompiles in transformers' models: decisions that torch cannot trace are made for them
while the compiled forward is called.

Seen in transformers 5.23. Without these fixes a model trains all the same, with graph breaks or a recompile.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

from optimum_memopt.engines.compile.torch_compat import dynamo

# DeBERTa picks the rows that have a label by an index whose length depends on data; others set `problem_type`.
_PICKS_LABELLED_ROWS = frozenset({"deberta", "deberta-v2"})
_ONE_LABEL = "single_label_classification"
# What `PreTrainedModel.loss_function` uses, after a warning that breaks the graph, where no name of a loss fits the
# class's name (GPT2LMHeadModel).
_LOSS_WITHOUT_NAME = "ForCausalLM"
# DeBERTa (the first one) puts a size into a tensor and slices with it, in each layer.
_SIZE_IN_A_TENSOR = "compute_attention_span"
# PEFT's DoRA asks for the module of a weight's class as a string, at each of its layers (seen in PEFT 0.21).
_CLASS_OF_WEIGHT = "dequantize_module_weight"
# bitsandbytes' layers of 8 bits move what their weight holds to their state in the first forward (0.50); a graph that
# was compiled before would be guarded on where it was.
_FIRST_FORWARD = "init_8bit_state"
# Images and videos: batch, channels, height, width. With symbols for all of them Swin compiles for minutes.
_IMAGE_DIMS = 4


class TraceFixes:
    """The fixes of one model under one compiled forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._config: Any = getattr(model, "config", None)
        self._nameless: list[Any] = [m for m in model.modules() if "loss_type" in vars(m) and m.loss_type is None]
        # Functions in the files of the model's modules, and those that are called instead.
        self._replaced: list[tuple[Any, str, Callable[..., Any]]] = []
        for file in {sys.modules.get(type(module).__module__) for module in model.modules()}:
            if hasattr(file, _SIZE_IN_A_TENSOR):
                self._replaced.append((file, _SIZE_IN_A_TENSOR, _attention_span))
            if hasattr(file, _CLASS_OF_WEIGHT):
                self._replaced.append((file, _CLASS_OF_WEIGHT, _weight_or(getattr(file, _CLASS_OF_WEIGHT))))
        self._in_8_bits: list[Any] = [module for module in model.modules() if hasattr(module, _FIRST_FORWARD)]
        # The forward itself sets a `problem_type` of None to this.
        self._set_by_forward: str | None = None

    @contextlib.contextmanager
    def around_call(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Apply the fixes, and leave the model as it would be after a plain forward with these keyword arguments."""
        with contextlib.ExitStack() as stack:
            for module in self._in_8_bits:
                if getattr(module.weight, "CB", None) is not None:
                    getattr(module, _FIRST_FORWARD)()
            for module in self._nameless:
                stack.enter_context(mock.patch.object(module, "loss_type", _LOSS_WITHOUT_NAME))
            for file, name, function in self._replaced:
                stack.enter_context(mock.patch.object(file, name, function))
            for tensor in inputs.values():
                if isinstance(tensor, torch.Tensor) and tensor.dim() >= _IMAGE_DIMS and tensor.is_floating_point():
                    dynamo.mark_static(tensor, range(1, tensor.dim()))
            if self._config is not None and hasattr(self._config, "problem_type"):
                stack.enter_context(self._problem_type(inputs.get("labels")))
            yield

    @contextlib.contextmanager
    def _problem_type(self, labels: Any) -> Iterator[None]:
        config = self._config
        before = config.problem_type
        has_one_label = before is None and _each_row_has_one_label(config, labels)
        if has_one_label:
            config.problem_type = _ONE_LABEL
        # A problem type that the first forward has set would fail a guard at the second step: each one sets it again.
        elif before is not None and before == self._set_by_forward:
            config.problem_type = None
        try:
            yield
        finally:
            if has_one_label:
                config.problem_type = None
            elif before is None:
                self._set_by_forward = config.problem_type
            elif config.problem_type is None:
                config.problem_type = before


def _attention_span(query: torch.Tensor, key: torch.Tensor, most: int) -> int:
    return min(max(query.size(-2), key.size(-2)), most)


def _weight_or(dequantized: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's function for modules whose weight is quantized; that of others is the weight itself.

    Weights of 4 bits are dequantized here as PEFT does it, but for what torch cannot trace there: that their `data` is
    read, and that they are put back on their device.
    """

    def weight(module: Any) -> Any:
        if not hasattr(module, "W_q") and type(module.weight) is torch.nn.Parameter:
            return module.weight
        if type(module.weight).__name__ != "Params4bit":
            return dequantized(module)
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(module.weight, module.weight.quant_state)

    return weight


def _each_row_has_one_label(config: Any, labels: Any) -> bool:
    """True where DeBERTa's loss would pick all rows; then it is the plain cross entropy, in float32 too."""
    return (
        getattr(config, "model_type", None) in _PICKS_LABELLED_ROWS
        and isinstance(labels, torch.Tensor)
        and labels.dim() == 1
        and not labels.is_floating_point()
        and config.num_labels > 1
        # A traced step's labels have no values.
        and (dynamo.is_fake(labels) or bool((labels >= 0).all()))
    )
