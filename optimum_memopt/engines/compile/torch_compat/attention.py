"""transformers' attention in a traced forward: masks that a batch does not need, and parts of one long row.

A traced forward leaves out the masks that a plain one does. transformers (`masking_utils.py`, 5.23) reads whether a
token is padding, and whether rows are shorter than the window of local attention; attention without a mask has kernels
of its own: on CUDA flash attention, which takes fewer key-value heads than queries. A mask that is traced has no
values, so that `torch.compile` alone keeps it: a bias of batch x queries x keys in each layer, keys and values for
each head.

Images or clips of several sizes are parts of one row. Where no flash attention is asked for, transformers splits
queries, keys and values at lengths that it reads from a tensor (`Qwen2VLVisionAttention` in
`models/qwen2_vl/modeling_qwen2_vl.py`, 5.23, and some 30 models like it). Traced, each length would be a symbol; the
operator `packed_attention` reads them while it runs.
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
from optimum_memopt.engines.compile.torch_compat.dynamo import arguments_of, file_of, forward_of, names_in_forward
from optimum_memopt.engines.compile.torch_compat.fake_tensors import Replacement, is_known_true
from optimum_memopt.engines.compile.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.compile.torch_compat.host_masks import is_true
from optimum_memopt.engines.compile.torch_compat.patches import Name, Patch
from optimum_memopt.plans.plan_file import PlanFile

_FILE = "transformers.masking_utils"
# Torch guards on whether a tensor that a traced forward is given has this attribute.
_MARK = "_memopt_has_no_padding"
_PREPARES = "_preprocess_mask_arguments"
_CAUSAL, _BIDIRECTIONAL = "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"
# Always true within a trace before torch 2.14 (pytorch#176499), where it keeps masks that are None.
_IS_EXPORTING = "is_torchdynamo_exporting"
# Asked instead before transformers 5.18; true within a trace also where there is no mask.
_IS_TRACING = "is_tracing"
# Reads the values of position ids: rows that are packed into one restart them.
_FINDS_PACKED = "find_packed_sequence_indices"
_POSITIONS = "position_ids"
# Arguments with a value for each token, by how their names end; and fields of configs.
_OF_TOKENS = ("input_ids", "inputs_embeds")
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
_MAKE_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}
# Whose forwards pass position ids on as they are, or number the tokens of a row.
_KNOWN_FORWARDS = ("transformers.models.", "peft.", "liger_kernel.")
_KNOWN_WRAPPERS = ("transformers.", "peft.", "liger_kernel.", "accelerate.", "torch.", "deepspeed.")
# Asked by an attention that splits a row into images, in its file.
_ASKS_FOR_FLASH = "is_flash_attention_requested"
_ATTENTIONS = "ALL_ATTENTION_FUNCTIONS"
_BOUNDS = "cu_seqlens"
MASKS = Patch(
    "attention masks of batches without padding",
    "attention masks are kept, also where no token is padding",
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
# With these excluded, as while an operator of this kind runs, autograd sees nothing.
_AUTOGRAD = ("AutogradFunctionality", "AutogradOther")


class KeptMasks(NamedTuple):
    """The masks that a traced forward makes.

    Attributes:
        padding: those of batches with padding.
        local: those of local attention; False only where all rows are shorter than its window.
    """

    padding: bool
    local: bool

    @classmethod
    def of(cls, file: PlanFile) -> "KeptMasks":
        """Those that a plan file was made with."""
        return cls(file.has_padding, file.has_local_masks)

    def with_those_of(self, other: "KeptMasks") -> "KeptMasks":
        """The masks that one of the two makes."""
        return KeptMasks(*map(max, self, other))

    def first_after(self, other: "KeptMasks") -> str:
        """The first batch with these masks behind ones with others, in words."""
        if self.padding != other.padding:
            return f"the first batch {'with' if self.padding else 'without'} padding"
        return f"the first batch {'with' if self.local else 'without'} rows as long as local attention's window"


class AttentionMasks:
    """The attention masks of one model's batches.

    Those that the first batch needs are made for all later ones: few do without, and each kind is traced by itself.

    Args:
        forward: the model's own.

    Attributes:
        kept: for the batch that was noted last.
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
        """Find the masks that a batch needs, the keyword arguments of a forward."""
        if all(self._always):
            return
        has_padding = not all(map(is_true, _masks(inputs).values()))
        needed = self.needed(has_padding, max(_lengths(inputs), default=math.inf))
        self.kept = needed.with_those_of(self._always)
        if self._is_first:
            self._always, self._is_first = self.kept, False

    def agree(self) -> None:
        """Make the masks that any rank needs now for all batches to come; every rank must call this."""
        for of_rank in of_all_ranks(self.kept):
            self.keep(of_rank)

    def keep(self, masks: KeptMasks) -> None:
        """Make these for all batches to come."""
        self._always = self._always.with_those_of(masks)
        self.kept = self.kept.with_those_of(masks)

    def expect(self, largest: LargestBatch) -> None:
        """Make the masks of the run's largest batch for all later batches."""
        self.keep(self.needed(largest.has_padding, largest.length))

    def needed(self, has_padding: bool, length: float) -> KeptMasks:
        """The masks that a batch needs.

        Args:
            length: tokens of its longest row.
        """
        # With padding, transformers leaves no mask out.
        return KeptMasks(has_padding, has_padding or self._window is None or length >= self._window)

    def replacements(self, args: Sequence[Any], inputs: Mapping[str, Any], drops_cache: bool) -> list[Replacement]:
        """Those with which a forward with these arguments is traced without the masks that it does not need.

        Args:
            drops_cache: the model is told to make no cache of keys and values; where there is one, transformers does
                not look for packed rows.
        """
        masks = () if self.kept.padding else _masks(inputs).values()
        has_caches = drops_cache and all(_makes_cache(module) for module in self._makers)
        is_in_order = self._numbers_tokens and not _may_be_packed(args, inputs)
        functions = self._functions(has_caches or is_in_order, self.kept.local)
        return [*((mask, _MARK, True) for mask in masks), *functions]

    def _functions(self, is_in_order: bool, keeps_local: bool) -> list[Replacement]:
        """Replacements for functions of transformers; the same in each call, since torch has guards on them."""
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
    """Names of the masks among a forward's inputs that mark no padding, as far as it is known."""
    return (name for name, mask in _masks(inputs).items() if is_known_true(mask))


def _masks(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {name: value for name, value in inputs.items() if is_mask(name) and isinstance(value, Tensor)}
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}


def _lengths(inputs: Mapping[str, Any]) -> Iterator[int]:
    """Tokens of the longest rows that a forward is given; none where it is not told by names."""
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 1 and (is_mask(name) or name.endswith(_OF_TOKENS)):
            yield value.shape[1]


def _windows(model: torch.nn.Module) -> Iterator[int]:
    """Tokens of which those of a local attention see each other."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        yield from (window for name in _WINDOWS if isinstance(window := getattr(config, name, None), int))


def _may_be_packed(args: Sequence[Any], inputs: Mapping[str, Any]) -> bool:
    """True where a forward may be given position ids, or compute them of images."""
    has_images = any(
        isinstance(value, Tensor) and value.is_floating_point() and name != "inputs_embeds"
        for name, value in inputs.items()
    )
    return len(args) > 1 or inputs.get(_POSITIONS) is not None or has_images


def _numbers_tokens(model: torch.nn.Module, forward: Callable[..., Any], makers: Sequence[str]) -> bool:
    """True where the position ids that masks are made of, in the modules of these paths, are given to the model, or
    number the tokens of a row."""
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
    return bool(getattr(getattr(module, "config", None), "use_cache", False))


def _is_from(function: Any, places: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(places)


def _without_full_mask(before: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def prepared(config: Any, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        is_ready, mask, *sizes = before(config, inputs_embeds, attention_mask, *args, **kwargs)
        is_full = isinstance(attention_mask, Tensor) and hasattr(attention_mask, _MARK)
        return (is_ready, None if is_full and not is_ready else mask, *sizes)

    return prepared


def _if_not_local(before: Callable[..., bool]) -> Callable[..., bool]:
    """Masks of local attention stay in a trace: torch would compile it anew for rows that are shorter."""

    def is_ignored(*args: Any) -> bool:
        return not (args[-1] is not None and torch.compiler.is_compiling()) and before(*args)

    return is_ignored


def _unless_traced(before: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is exported or packed within a trace; other threads' forwards are theirs."""

    def asked(*args: Any) -> Any:
        return None if torch.compiler.is_compiling() else before(*args)

    return asked


def _unless_nothing(before: Callable[..., bool]) -> Callable[..., bool]:
    """A mask that is None has no values, which a trace would not know."""

    def asked(tensor: Any = None) -> bool:
        return tensor is not None and before(tensor) if torch.compiler.is_compiling() else before(tensor)

    return asked


@torch.library.custom_op(f"{LIBRARY}::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> Tensor:
    """Attend within each part.

    Args:
        query: [1, heads, tokens, width of a head], as `key` and `value`.
        bounds: [parts + 1] where parts begin, 0 first, and how many tokens there are.
        is_fused: by torch's operator; else by products and a softmax in float32 (`eager` in transformers).

    Returns:
        [1, tokens, heads, width], contiguous.

    Raises:
        RuntimeError: the parts are not as long as the row.
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
    """The gradients of query, key and value. Each part attends again: what kernels save for their backward differs by
    device and size, and is one more row of results."""
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
    """Floating-point operations for parts that are equally long, since no lengths are known."""
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
    """Bounds of parts that are about equally long."""
    return torch.linspace(0, tokens, len(bounds), device=bounds.device).to(bounds.dtype)


def attention_of_parts(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, is_fused: bool
) -> Tensor:
    """`packed_attention` under autocast too, which casts what attention is given."""
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
    """Autograd within an operator, which is called behind it (`c10/core/impl/LocalDispatchKeySet.h`)."""
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
    """The attentions that split a row into images, since no flash attention is asked for."""
    for module in model.modules():
        takes_row = (
            _ASKS_FOR_FLASH in names_in_forward(module)
            and _BOUNDS in arguments_of(module)
            and "forward" not in vars(module)
        )
        if takes_row and "flash" not in (getattr(module.config, "_attn_implementation", None) or ""):
            yield module


def may_be_one_operator(module: Any) -> bool:
    """True where `packed_attention` may stand for an attention."""
    groups, dropout = getattr(module, "num_key_value_groups", 1), getattr(module, "attention_dropout", 0.0)
    return module.config._attn_implementation in ("eager", "sdpa") and groups == 1 and not dropout


def packed_attentions(modules: list[Any]) -> Iterator[Replacement]:
    """Replacements in the files of these modules for the code that splits a row, by their names there."""
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
    """A file's `AttentionInterface`, for modules of these classes with an operator for all images.

    Everything else is asked of the interface.
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
