"""transformers' attention in a traced forward: drops masks that a batch does not need, and attends within packed rows.

A traced forward leaves out the masks that a plain one does. transformers (`masking_utils.py`, 5.23) reads whether a
token is padding, and whether rows are shorter than the window of local attention. Attention without a mask has kernels
of its own: on CUDA flash attention, which takes fewer key-value heads than query heads. A traced mask has no values,
so `torch.compile` alone keeps it: a bias of batch x queries x keys in each layer, and keys and values repeated for
each head.

Images or clips of several sizes are packed into one row. Unless flash attention is requested, transformers splits
queries, keys and values at lengths that it reads from a tensor (`Qwen2VLVisionAttention` in
`models/qwen2_vl/modeling_qwen2_vl.py`, 5.23, and some 30 models like it). In a trace each length would be a symbol;
the operator `packed_attention` reads the lengths at run time.
"""

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from optimum_memopt.compat.torch import of_all_ranks
from optimum_memopt.compat.transformers import is_mask
from optimum_memopt.engines.api.run import LargestBatch
from optimum_memopt.engines.shared.forward_patch import would_checkpoint
from optimum_memopt.engines.torch_compat.dynamo import arguments_of, file_of, forward_of, names_in_forward
from optimum_memopt.engines.torch_compat.fake_tensors import Replacement, is_known_true
from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.torch_compat.host_masks import is_true
from optimum_memopt.engines.torch_compat.patches import Name, Patch
from optimum_memopt.engines.torch_compat.recompiles import NO_PADDING
from optimum_memopt.plans.plan_file import PlanFile

_FILE = "transformers.masking_utils"
_PREPARES = "_preprocess_mask_arguments"
_CAUSAL, _BIDIRECTIONAL = "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"
# Always true in a trace before torch 2.14 (pytorch#176499); transformers then keeps masks that are None.
_IS_EXPORTING = "is_torchdynamo_exporting"
# Called instead before transformers 5.18; true in a trace also if there is no mask.
_IS_TRACING = "is_tracing"
# Reads the values of position ids, which restart in packed rows.
_FINDS_PACKED = "find_packed_sequence_indices"
_POSITIONS = "position_ids"
# Suffixes of the names of arguments with a value for each token.
_OF_TOKENS = ("input_ids", "inputs_embeds")
# Fields of configs with the window of local attention.
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
_MAKE_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}
# Packages whose forwards pass position ids on as they are, or number the tokens of a row; and whose wrappers do.
_KNOWN_FORWARDS = ("transformers.models.", "peft.", "liger_kernel.")
_KNOWN_WRAPPERS = ("transformers.", "peft.", "liger_kernel.", "accelerate.", "torch.", "deepspeed.")
# Names in the file of an attention that splits a row into images, and its argument with their bounds.
_ASKS_FOR_FLASH = "is_flash_attention_requested"
_ATTENTIONS = "ALL_ATTENTION_FUNCTIONS"
_BOUNDS = "cu_seqlens"
MASKS = Patch(
    "attention masks of batches without padding",
    "attention masks are kept even for batches without padding",
    "transformers",
    since="5.0",
    tested="5.0 to 5.24",
    names=(
        Name(_FILE, _PREPARES, ("config", "", "attention_mask")),
        Name(_FILE, _IS_EXPORTING, instead=_IS_TRACING),
        Name(_FILE, _FINDS_PACKED, ("position_ids",)),
        Name(_FILE, _CAUSAL, ("padding_mask",)),
        Name(_FILE, _BIDIRECTIONAL, ("padding_mask",)),
    ),
)
# Dispatch keys that are excluded while a custom operator runs, so that autograd records nothing.
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther")


class KeptMasks(NamedTuple):
    """The kinds of masks that a traced forward makes.

    Attributes:
        padding: masks for batches with padding.
        local: masks of local attention; False only if all rows are shorter than its window.
    """

    padding: bool
    local: bool

    @classmethod
    def of(cls, file: PlanFile) -> "KeptMasks":
        """Returns the masks that a plan file was made with."""
        return cls(file.has_padding, file.has_local_masks)

    def with_those_of(self, other: "KeptMasks") -> "KeptMasks":
        """Returns the union of two sets of masks."""
        return KeptMasks(*map(max, self, other))

    def first_after(self, other: "KeptMasks") -> str:
        """Describes the first batch that needs these masks after batches that needed others."""
        if self.padding != other.padding:
            return f"the first batch {'with' if self.padding else 'without'} padding"
        return f"the first batch {'with' if self.local else 'without'} rows as long as local attention's window"


class AttentionMasks:
    """The attention masks of one model's batches.

    The masks that the first batch needs are made for all later ones: few batches need fewer, and each combination is
    traced by itself.

    Args:
        model: the model that makes the masks.
        forward: its forward, without the engine's wrapper.

    Attributes:
        kept: the masks for the batch of the last `note`.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._is_possible = MASKS.applies
        self.kept = self._always = KeptMasks(padding=not self._is_possible, local=not self._is_possible)
        self._is_first = True
        self._window = min(_windows(model), default=None)
        paths = [path for path, module in model.named_modules() if _MAKE_MASKS & names_in_forward(module)]
        self._makers: list[Any] = list(map(model.get_submodule, paths))
        self._numbers_tokens = _numbers_tokens(model, forward, paths)
        self._replaced: dict[tuple[bool, bool], list[Replacement]] = {}

    def note(self, inputs: Mapping[str, Any]) -> None:
        """Set `kept` for a batch, given as the keyword arguments of a forward."""
        if all(self._always):
            return
        has_padding = not all(map(is_true, _masks(inputs).values()))
        needed = self.needed(has_padding, max(_lengths(inputs), default=math.inf))
        self.kept = needed.with_those_of(self._always)
        if self._is_first:
            self._always, self._is_first = self.kept, False

    def agree(self) -> None:
        """Keep the masks that any rank needs now for all later batches; every rank must call this."""
        for of_rank in of_all_ranks(self.kept):
            self.keep(of_rank)

    def keep(self, masks: KeptMasks) -> None:
        """Make these masks for all later batches."""
        self._always = self._always.with_those_of(masks)
        self.kept = self.kept.with_those_of(masks)

    def expect(self, largest: LargestBatch) -> None:
        """Make the masks of the run's largest batch for all later batches."""
        self.keep(self.needed(largest.has_padding, largest.length))

    def needed(self, has_padding: bool, length: float) -> KeptMasks:
        """Returns the masks that a batch needs.

        Args:
            has_padding: whether a mask of the batch marks padding.
            length: the tokens of its longest row.
        """
        # With padding, transformers makes all masks.
        return KeptMasks(has_padding, has_padding or self._window is None or length >= self._window)

    def replacements(self, args: Sequence[Any], inputs: Mapping[str, Any], drops_cache: bool) -> list[Replacement]:
        """Returns replacements that trace a forward with these arguments without the masks that it does not need.

        Args:
            args: positional arguments of the forward.
            inputs: its keyword arguments.
            drops_cache: whether the model is called without a KV cache; with a cache, transformers does not look for
                packed rows.
        """
        masks = () if self.kept.padding else _masks(inputs).values()
        has_caches = drops_cache and all(_makes_cache(module) for module in self._makers)
        is_in_order = self._numbers_tokens and not _may_be_packed(args, inputs)
        functions = self._functions(has_caches or is_in_order, self.kept.local)
        return [*((mask, NO_PADDING, True) for mask in masks), *functions]

    def _functions(self, is_in_order: bool, keeps_local: bool) -> list[Replacement]:
        """Returns replacements for functions of transformers, the same at each call, since torch guards on them."""
        way = is_in_order, keeps_local
        if way not in self._replaced:
            file: Any = importlib.import_module(_FILE)
            made: dict[str, Callable[[Any], Callable[..., Any]]] = {_PREPARES: _without_full_mask}
            if hasattr(file, _IS_EXPORTING):
                made[_IS_EXPORTING] = _unless_traced
            else:
                made[_IS_TRACING] = _unless_nothing
            if keeps_local:
                made |= {_CAUSAL: _if_not_local, _BIDIRECTIONAL: _if_not_local}
            if is_in_order:
                made[_FINDS_PACKED] = _unless_traced
            self._replaced[way] = [
                (file, name, make(getattr(file, name))) for name, make in made.items() if self._is_possible
            ]
        return self._replaced[way]


def without_padding(inputs: Mapping[str, Any]) -> Iterator[str]:
    """Returns the names of a forward's masks that are known to mark no padding."""
    return (name for name, mask in _masks(inputs).items() if is_known_true(mask))


def _masks(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in inputs.items() if is_mask(name) and isinstance(value, Tensor)}
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}


def _lengths(inputs: Mapping[str, Any]) -> Iterator[int]:
    """Yields the row lengths of a forward's token inputs; nothing if no input has a known name."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 1 and (is_mask(name) or name.endswith(_OF_TOKENS)):
            yield value.shape[1]


def _windows(model: torch.nn.Module) -> Iterator[int]:
    """Yields the windows of a model's local attention, in tokens."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        yield from (window for name in _WINDOWS if isinstance(window := getattr(config, name, None), int))


def _may_be_packed(args: Sequence[Any], inputs: Mapping[str, Any]) -> bool:
    """True if a forward may receive position ids, or compute them from images."""
    has_images = any(
        isinstance(value, Tensor) and value.is_floating_point() and name != "inputs_embeds"
        for name, value in inputs.items()
    )
    return len(args) > 1 or inputs.get(_POSITIONS) is not None or has_images


def _numbers_tokens(model: torch.nn.Module, forward: Callable[..., Any], makers: Sequence[str]) -> bool:
    """True if masks are made from position ids that were passed to the model, or that number the tokens of a row.

    Args:
        model: the model, called with `forward`.
        forward: its forward.
        makers: paths of the modules that make masks.
    """
    parts = [path.split(".") for path in makers]
    around = {".".join(part[:depth]) for part in parts for depth in range(len(part) + 1)}
    modules = list(map(model.get_submodule, around))
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    own = [vars(module)["forward"] for module in modules if module is not model and "forward" in vars(module)]
    wrappers = map(inspect.unwrap, (forward, *hooks, *own))
    return all(_is_from(forward_of(module), _KNOWN_FORWARDS) for module in modules) and all(
        _is_from(function, _KNOWN_WRAPPERS) for function in wrappers
    )


def _makes_cache(module: Any) -> bool:
    """True if a module makes a KV cache in plain PyTorch: by its config, unless it checkpoints
    (`merge_with_config_defaults` in `transformers/utils/generic.py`, 5.23; earlier in each model)."""
    return bool(getattr(getattr(module, "config", None), "use_cache", False)) and not would_checkpoint(module)


def _is_from(function: Any, places: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(places)


def _without_full_mask(before: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def prepared(config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        is_ready, mask, *sizes = before(config, inputs_embeds, attention_mask, *args, **kwargs)
        is_full = isinstance(attention_mask, Tensor) and hasattr(attention_mask, NO_PADDING)
        return (is_ready, None if is_full and not is_ready else mask, *sizes)

    return prepared


def _if_not_local(before: Callable[..., bool]) -> Callable[..., bool]:
    """Keep the masks of local attention in a trace: torch would recompile for rows shorter than the window."""

    def is_ignored(*args: Any) -> bool:
        return not (args[-1] is not None and torch.compiler.is_compiling()) and before(*args)

    return is_ignored


def _unless_traced(before: Callable[..., Any]) -> Callable[..., Any]:
    """Report nothing exported or packed in a trace; forwards of other threads are unaffected."""

    def asked(*args: Any) -> Any:
        return None if torch.compiler.is_compiling() else before(*args)

    return asked


def _unless_nothing(before: Callable[..., bool]) -> Callable[..., bool]:
    """Report no tracing in a trace for a mask that is None, which has no values to read."""

    def asked(tensor: Any = None) -> bool:
        return tensor is not None and before(tensor) if torch.compiler.is_compiling() else before(tensor)

    return asked


@torch.library.custom_op(f"{LIBRARY}::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> Tensor:
    """Compute attention within each part of a row.

    Args:
        query: [1, heads, tokens, head width], as `key` and `value`.
        bounds: [parts + 1], the starts of the parts, beginning with 0, and the number of tokens.
        is_fused: whether to use torch's fused operator; else matrix products and a softmax in float32 (`eager` in
            transformers).

    Returns:
        [1, tokens, heads, head width], contiguous.

    Raises:
        RuntimeError: the parts together are not as long as the row.
    """
    attended = _empty_like(query)
    lengths = _lengths_of_parts(bounds)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    for part, result in zip(parts, attended.split(lengths, dim=1), strict=True):
        result.copy_(_attend(part, scale, is_fused).transpose(1, 2))
    return attended


@packed_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool) -> Tensor:
    return _empty_like(query)


@torch.library.custom_op(f"{LIBRARY}::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> list[Tensor]:
    """Returns the gradients of query, key and value.

    Recomputes the attention of each part: which tensors a kernel saves for its backward depends on device and size,
    and they are as large as another row of results.
    """
    lengths = _lengths_of_parts(bounds)
    given = (query, key, value)
    gradients = [torch.empty_like(tensor) for tensor in given]
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in given), strict=True)
    results = zip(*(tensor.split(lengths, dim=2) for tensor in gradients), strict=True)
    for part, result, of_part in zip(parts, results, gradient.split(lengths, dim=1), strict=True):
        with _with_autograd(query.device.type):
            leaves = [tensor.detach().requires_grad_() for tensor in part]
            attended = _attend(leaves, scale, is_fused).transpose(1, 2).contiguous()
            found = torch.autograd.grad(attended, leaves, of_part)
        for tensor, each in zip(result, found, strict=True):
            tensor.copy_(each)
    return gradients


@packed_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (query, key, value)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.is_fused = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return *packed_attention_backward(gradient, *ctx.saved_tensors, ctx.scale, ctx.is_fused), None, None, None


packed_attention.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.optimum_memopt.packed_attention)
def _flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], bounds: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Returns the floating-point operations for parts of equal length, since the lengths are unknown."""
    return int(sdpa_flop_count(query, key, value)) // _parts(bounds)


@register_flop_formula(torch.ops.optimum_memopt.packed_attention_backward)
def _flops_of_backward(
    gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], bounds: Sequence[int],
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    of_results = (query[0], query[1], query[2], value[3])
    again = _flops(query, key, value, bounds)
    return again + int(sdpa_backward_flop_count(of_results, query, key, value)) // _parts(bounds)


def _parts(bounds: Sequence[int]) -> int:
    return max(bounds[0] - 1, 1)


def equal_parts(bounds: Tensor, tokens: int) -> Tensor:
    """Returns the bounds of parts of about equal length."""
    return torch.linspace(0, tokens, len(bounds), device=bounds.device).to(bounds.dtype)


def attention_of_parts(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> Tensor:
    """Call `packed_attention`, with the casts of autocast."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return packed_attention(query, key, value, bounds, scale, is_fused)


def _attend(given: Sequence[Tensor], scale: float, is_fused: bool) -> Tensor:
    query, key, value = given
    if is_fused:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)


def _lengths_of_parts(bounds: Tensor) -> list[int]:
    return (bounds[1:] - bounds[:-1]).tolist()


def _empty_like(query: Tensor) -> Tensor:
    batch, heads, tokens, width = query.shape
    return query.new_empty((batch, tokens, heads, width))


@contextlib.contextmanager
def _with_autograd(device_type: str) -> Iterator[None]:
    """Enable autograd inside an operator, which runs below it (`c10/core/impl/LocalDispatchKeySet.h`)."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for name in _AUTOGRAD:
        excluded = excluded.remove(getattr(torch._C.DispatchKey, name))
    included = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.autocast(device_type, enabled=False),
        torch.enable_grad(),
    ):
        yield


def row_splitters(model: torch.nn.Module) -> Iterator[Any]:
    """Yields the attention modules that split a row into images, since flash attention is not requested."""
    for module in model.modules():
        takes_row = (
            _ASKS_FOR_FLASH in names_in_forward(module)
            and _BOUNDS in arguments_of(module)
            and "forward" not in vars(module)
        )
        if takes_row and "flash" not in (getattr(module.config, "_attn_implementation", None) or ""):
            yield module


def may_be_one_operator(module: Any) -> bool:
    """True if `packed_attention` can replace an attention module's computation."""
    groups, dropout = getattr(module, "num_key_value_groups", 1), getattr(module, "attention_dropout", 0.0)
    return module.config._attn_implementation in ("eager", "sdpa") and groups == 1 and not dropout


def packed_attentions(modules: list[Any]) -> Iterator[Replacement]:
    """Yields replacements for the code that splits a row, in the files of these modules."""
    for file in filter(None, set(map(file_of, modules))):
        inside = [module for module in modules if file_of(module) is file]
        kinds, configs = tuple({type(module) for module in inside}), [module.config for module in inside]
        yield file, _ASKS_FOR_FLASH, _asked_for_flash(getattr(file, _ASKS_FOR_FLASH), configs)
        yield file, _ATTENTIONS, _PackedAttentions(getattr(file, _ATTENTIONS), kinds)


def _asked_for_flash(before: Callable[..., bool], configs: list[Any]) -> Callable[..., bool]:
    def is_asked_for(config: Any = None, *args: Any, **kwargs: Any) -> bool:
        return any(config is each for each in configs) or before(config, *args, **kwargs)

    return is_asked_for


class _PackedAttentions:
    """Wraps a file's `AttentionInterface`: modules of these classes use one operator for all images.

    Everything else is delegated to the interface.
    """

    def __init__(self, before: Any, kinds: tuple[type, ...]) -> None:
        self._before, self._kinds = before, kinds

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        before, kinds = self._before.get_interface(name, default), self._kinds

        def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(module, kinds):
                return before(module, query, key, value, *args, **kwargs)
            bounds, scale = kwargs["cu_seq_lens_q"], kwargs["scaling"]
            return attention_of_parts(query, key, value, bounds, scale, name == "sdpa"), None

        return attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)
