"""Replacements for code of transformers, PEFT and TRL that torch cannot trace, in place while a compiled forward runs.

transformers collects hidden states, attentions and other outputs by hooks on the modules that return them
(`transformers/utils/output_capturing.py`, 5.23). The first forward that requests one kind of output registers the
hooks of all kinds, which stay; hooks of other kinds do nothing. LLaVA and similar models request the hidden states of
their vision tower in each forward.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimum_memopt.compat.bitsandbytes import gathered_products, is_8bit, move_to_state
from optimum_memopt.engines.torch_compat import expert_adapters, fused_lm_head, int8_products, liger, zero3
from optimum_memopt.engines.torch_compat.attention import may_be_one_operator, packed_attentions, row_splitters
from optimum_memopt.engines.torch_compat.dynamo import (
    Trace,
    arguments_of,
    draws_with_numpy,
    file_of,
    is_fake,
    own_forward,
    untraced,
)
from optimum_memopt.engines.torch_compat.fake_tensors import Replacement, with_attributes
from optimum_memopt.engines.torch_compat.patches import Name, Patch
from optimum_memopt.engines.torch_compat.run_ahead import RunAhead


class _OneAtATime(contextlib.ContextDecorator):
    """A reentrant lock, held by the thread that traces or simulates."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


# While it is held, functions of transformers, torch's switches and global module hooks are replaced for the whole
# process, and torch's fake tensors are in one mode.
one_at_a_time = _OneAtATime()


class _Applied:
    """The fixes of the forward that is traced.

    Attributes:
        restoring: replacements that restore what plain PyTorch would run.
    """

    restoring: tuple[Replacement, ...] = ()


def without_fixes() -> contextlib.AbstractContextManager[Any]:
    """Run the code of plain PyTorch within a traced forward."""
    return with_attributes(_Applied.restoring)


# DeBERTa picks the rows that have a label by an index whose length depends on data; other models set `problem_type`.
_PICKS_LABELLED_ROWS = frozenset({"deberta", "deberta-v2"})
_ONE_LABEL = "single_label_classification"
# The loss that `PreTrainedModel.loss_function` uses, after a warning that breaks the graph, if no loss's name matches
# the class's name (GPT2LMHeadModel).
_LOSS_WITHOUT_NAME = "ForCausalLM"
# DeBERTa (the first one) puts a size into a tensor and slices with it, in each layer.
_SIZE_IN_A_TENSOR = "compute_attention_span"
# PEFT's DoRA reads the `__module__` of a weight's class, in each of its layers (seen in PEFT 0.21).
_CLASS_OF_WEIGHT = "dequantize_module_weight"
# In models that pack images of several sizes into a row: the prefix of functions that read these sizes
# (`transformers/vision_utils.py`, 5.23), and methods of the modules that find the places of images in a text (Idefics:
# the second).
_READ_SIZES = "get_vision_"
_FINDS_IMAGES = ("get_placeholder_mask", "inputs_merger")
# Arguments that a forward reads to loop over images (Pixtral, Mistral 3), or to put their features into a text
# (Kosmos).
_READ_BY_FORWARD = {"image_sizes", "image_embeds_position_mask"}
_COMPUTES_LOSS = "labels"
# A method that adds the features of images at their places in a text, between the layers.
_ADDS_FEATURES = "_deepstack_process"
# Names of transformers' hooks that collect outputs.
_COLLECTS = "transformers.utils.output_capturing"
_HOOK = "output_capturing_hook"
_COLLECTOR = "_active_collector"
_PUTS_HOOKS = "maybe_install_capturing_hooks"
_HAS_HOOKS = "_output_capturing_hooks_installed"
COLLECTED = Patch(
    "hidden states and attentions that a forward collects",
    "a forward that collects hidden states or attentions breaks its graph at each layer",
    "transformers",
    since="5.2",
    tested="5.2 to 5.24",
    names=(
        Name(_COLLECTS, _COLLECTOR),
        Name(_COLLECTS, _PUTS_HOOKS, ("model",), (_HAS_HOOKS,)),
        Name(_COLLECTS, "install_output_capuring_hook", mentions=(_HOOK, "key")),
    ),
)
LOSS_BY_NAME = Patch(
    "losses of models whose class does not name one",
    "a warning about the loss breaks the graph of GPT-2 and similar models",
    "transformers",
    since="5.0",
    tested="5.0 to 5.24",
    names=(Name("transformers.modeling_utils", "PreTrainedModel.loss_function.fget", mentions=(_LOSS_WITHOUT_NAME,)),),
)


class TraceFixes:
    """The trace fixes of one model under one compiled forward.

    Args:
        model: the model.
        compiled: compiles a forward whose first argument is the module; None: code outside of layers runs in eager
            mode anyway.
        chunks_loss: whether losses over a vocabulary may be computed in chunks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
        chunks_loss: bool = True,
    ) -> None:
        self._config: Any = getattr(model, "config", None)
        # Replacements for methods of modules and for functions in their files.
        self._replaced: list[Replacement] = [
            *fused_lm_head.replacements(),
            *expert_adapters.replacements(),
            *int8_products.replacements(),
            *zero3.replacements(),
            *gathered_products(model),
        ]
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._replaced += liger.replacements(device, chunks_loss)
        for file in filter(None, set(map(file_of, model.modules()))):
            for name, function in vars(file).items():
                if callable(function) and (name.startswith(_READ_SIZES) or draws_with_numpy(function)):
                    self._replaced.append((file, name, untraced(function)))
            if hasattr(file, _SIZE_IN_A_TENSOR):
                self._replaced.append((file, _SIZE_IN_A_TENSOR, _attention_span))
            if hasattr(file, _CLASS_OF_WEIGHT):
                self._replaced.append((file, _CLASS_OF_WEIGHT, _weight_or(getattr(file, _CLASS_OF_WEIGHT))))
        self._split_rows = list(row_splitters(model))
        self._packed = list(packed_attentions(self._split_rows))
        self._compiled = compiled
        # Compiled forwards of the children of modules that read values.
        self._forwards: dict[torch.nn.Module, Callable[..., Any]] = {}
        inner = () if compiled is None else model.modules()
        finders = [module for module in inner if module is not model and _finds_images(module)]
        loops = () if compiled is None else _loop_over_images(model)
        self._read_values = [*finders, *(each for each in loops if each not in finders)]
        self._ahead = RunAhead(model, finders)
        for module in model.modules():
            if vars(module).get("loss_type", "") is None:
                self._replaced.append((module, "loss_type", _LOSS_WITHOUT_NAME))
            if hasattr(type(module), _ADDS_FEATURES):
                self._replaced.append((module, _ADDS_FEATURES, untraced(getattr(module, _ADDS_FEATURES))))
        self._in_8_bits = list(filter(is_8bit, model.modules()))
        self._collects = COLLECTED.applies
        # The value to which the forward itself sets a `problem_type` of None.
        self._set_by_forward: str | None = None

    def move_scales(self) -> None:
        """Move the scales of 8-bit weights to the state of their layers, as the layers' first forward does."""
        for product in self._in_8_bits:
            move_to_state(product)

    @contextlib.contextmanager
    def around_call(
        self, inputs: Mapping[str, Any], others: Sequence[Replacement], stops_at_hooks: bool
    ) -> Iterator[None]:
        """Apply the fixes, and leave the model as it would be after a plain forward.

        Args:
            inputs: keyword arguments of the forward.
            others: replacements for this call, beside the model's.
            stops_at_hooks: whether a forward that registers hooks raises `HooksPutError` there, before more of it is
                compiled.
        """
        # A graph that is compiled before the move would have guards on the scales' old place.
        self.move_scales()
        try:
            with (
                with_attributes(self._replacements()) as fixes,
                with_attributes(
                    (*others, *(_collector_replacements(stops_at_hooks) if self._collects else ()))
                ) as of_call,
                self._problem_type(inputs.get("labels")),
                with_attributes([(_Applied, "restoring", (*of_call, *fixes, *_Applied.restoring))]),
            ):
                yield
        finally:
            self._ahead.forget()

    def _replacements(self) -> Iterator[Replacement]:
        yield from self._replaced
        if all(map(may_be_one_operator, self._split_rows)):
            yield from self._packed
        else:
            yield from ((module, "forward", _untraced_forward(module)) for module in self._split_rows)
        for module in self._read_values:
            yield from self._opened(module)

    @property
    def opens_modules(self) -> bool:
        """True if modules that read values run outside of all graphs."""
        return bool(self._read_values)

    def run_ahead(self, forward: Callable[[], Any]) -> None:
        """Run the module that reads values before the forward that calls it is traced; call within `around_call`."""
        self._ahead.run(forward)

    def forget(self) -> None:
        """Drop the compiled forwards in modules that read values, so that they are compiled again."""
        self._forwards.clear()

    def _opened(self, module: torch.nn.Module) -> Iterator[Replacement]:
        """Yields replacements that run a module in eager mode, and compile each of its children by itself."""
        is_ahead = self._ahead.is_for(module)
        yield module, "forward", self._ahead.forward() if is_ahead else _untraced_forward(module)
        assert self._compiled is not None
        for child in _called_in(module):
            # The forward of a child that is opened too is already replaced.
            if next(child.children(), None) is not None and "forward" not in vars(child):
                if child not in self._forwards:
                    self._forwards[child] = self._compiled(own_forward())
                yield child, "forward", functools.partial(self._forwards[child], child)

    @contextlib.contextmanager
    def _problem_type(self, labels: Any) -> Iterator[None]:
        config = self._config
        if config is None or not hasattr(config, "problem_type"):
            yield
            return
        before = config.problem_type
        has_one_label = before is None and _each_row_has_one_label(config, labels)
        if has_one_label:
            config.problem_type = _ONE_LABEL
        # A problem type that the first forward has set would fail a guard in the second step: each forward sets it.
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


def _untraced_forward(module: torch.nn.Module) -> Callable[..., Any]:
    return untraced(functools.partial(type(module).forward, module))


def _finds_images(module: torch.nn.Module) -> bool:
    """True for modules that put images into a text, and read their places, number and sizes."""
    # On the class: PEFT's wrapper of a model has the model's attributes too.
    finds = any(hasattr(type(module), name) for name in _FINDS_IMAGES) and "forward" not in vars(module)
    return finds and _COMPUTES_LOSS not in arguments_of(module)


def _loop_over_images(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the innermost modules whose forwards have an argument of `_READ_BY_FORWARD`."""
    for module in model.modules():
        given = arguments_of(module)
        reads = _READ_BY_FORWARD & given and _COMPUTES_LOSS not in given and "forward" not in vars(module)
        inside = (inner for inner in module.modules() if inner is not module)
        if reads and module is not model and not any(_READ_BY_FORWARD & arguments_of(inner) for inner in inside):
            yield module


def _called_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields a module's children, and those in lists and dicts of modules, which its forward calls."""
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _called_in(child)
        else:
            yield child


def _attention_span(query: torch.Tensor, key: torch.Tensor, most: int) -> int:
    return min(max(query.size(-2), key.size(-2)), most)


def _weight_or(dequantized: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that returns a module's weight, dequantized by PEFT's function if it is quantized.

    4-bit weights are dequantized here as in PEFT, without the steps that torch cannot trace: reading their `data`, and
    moving them back to their device.
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
    """True if DeBERTa's loss would pick all rows; it then equals plain cross entropy, in float32 too."""
    return (
        getattr(config, "model_type", None) in _PICKS_LABELLED_ROWS
        and isinstance(labels, torch.Tensor)
        and labels.dim() == 1
        and not labels.is_floating_point()
        and config.num_labels > 1
        # A traced step's labels have no values.
        and (is_fake(labels) or bool((labels >= 0).all()))
    )


class HooksPutError(Exception):
    """Raised when a forward has registered hooks on modules that collect their outputs."""


class _Collector:
    """The outputs that the running forward collects, by kind.

    Replaces a `ContextVar`, which torch does not trace. transformers' own class uses a global variable while torch
    traces, but not when Python runs, so nothing is collected from a traced module inside an untraced one.
    """

    collected: dict[str, Any] | None = None

    def get(self) -> dict[str, Any] | None:
        return self.collected

    def set(self, value: dict[str, Any] | None) -> tuple[dict[str, Any] | None]:
        before, self.collected = self.collected, value
        return (before,)

    def reset(self, token: tuple[dict[str, Any] | None]) -> None:
        (self.collected,) = token


# One object for all forwards, since torch guards on it.
COLLECTOR = _Collector()


def collecting() -> tuple[object, ...]:
    """Returns the objects that hooks change when they collect an output."""
    collected = COLLECTOR.collected
    return (COLLECTOR, collected, *(collected or {}).values())


def kind_of(hook: Any) -> str | None:
    """Returns the kind of output that a module's hook collects; None if the hook is not transformers'."""
    code = getattr(hook, "__code__", None)
    if code is None or code.co_name != _HOOK or "key" not in code.co_freevars:
        return None
    kind: str = hook.__closure__[code.co_freevars.index("key")].cell_contents
    return kind


def collected_kinds() -> frozenset[str]:
    """Returns the kinds of output that the current forward collects, traced or not; call within `around_call`."""
    traced = Trace.keys_set_to(COLLECTOR, "collected") if Trace.current() is not None else None
    return frozenset(COLLECTOR.collected or ()) if traced is None else traced


def without_collecting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward during which hooks collect nothing."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before, COLLECTOR.collected = COLLECTOR.collected, None
        try:
            return forward(*args, **kwargs)
        finally:
            COLLECTOR.collected = before

    return run


def _collector_replacements(stops_at_hooks: bool) -> Iterator[Replacement]:
    """Yields replacements in transformers' file that make its hooks traceable."""
    file: Any = sys.modules[_COLLECTS]
    puts = getattr(file, _PUTS_HOOKS)

    @untraced
    def stopped(model: torch.nn.Module) -> None:
        puts(model)
        if stops_at_hooks:
            raise HooksPutError

    def put(model: torch.nn.Module) -> None:
        if not getattr(model, _HAS_HOOKS, False):
            stopped(model)

    COLLECTOR.collected = getattr(file, _COLLECTOR).get()
    yield file, _COLLECTOR, COLLECTOR
    yield file, _PUTS_HOOKS, put
