"""Attention masks of batches without padding: a traced forward leaves them out where a plain one does.

transformers (`masking_utils.py`, 5.23) reads whether a token is padding, and attention without a mask has kernels of
its own: on CUDA flash attention, which takes fewer key-value heads than queries. A mask that is traced has no values,
so that `torch.compile` alone keeps it: a bias of batch x queries x keys in each layer, keys and values for each head.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimum_memopt.compat import is_mask, of_all_ranks
from optimum_memopt.engines.compile.torch_compat.fake_tensors import is_known_true
from optimum_memopt.engines.compile.torch_compat.trace_fixes import forward_of

_FILE = "transformers.masking_utils"
# Torch guards on whether a tensor that a traced forward is given has this attribute.
_MARK = "_memopt_has_no_padding"
_PREPARES = "_preprocess_mask_arguments"
_CAUSAL, _BIDIRECTIONAL = "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"
# Always true within a trace before torch 2.14 (pytorch#176499), where it keeps masks that are None.
_IS_EXPORTING = "is_torchdynamo_exporting"
# Reads the values of position ids: rows that are packed into one restart them.
_FINDS_PACKED = "find_packed_sequence_indices"
_POSITIONS = "position_ids"
_MAKE_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
}
# Whose forwards pass position ids on as they are, or number the tokens of a row.
_KNOWN_FORWARDS = ("transformers.models.", "peft.", "liger_kernel.")
_KNOWN_WRAPPERS = ("transformers.", "peft.", "liger_kernel.", "accelerate.", "torch.", "deepspeed.")


class AttentionMasks:
    """The attention masks of one model's batches.

    Where the first one has padding, all later ones count as such: few are without, and each kind is traced by itself.

    Args:
        forward: the model's own.

    Attributes:
        has_padding: the batch that was noted last counts as one with padding.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self.has_padding = self._always = False
        self._is_first = True
        paths = [path for path, module in model.named_modules() if _MAKE_MASKS & _names(forward_of(module))]
        self._makers: list[Any] = list(map(model.get_submodule, paths))
        self._numbers_tokens = _numbers_tokens(model, forward, paths)
        self._replaced: dict[bool, dict[str, Callable[..., Any]]] = {}

    def note(self, inputs: Mapping[str, Any], is_sharded: bool) -> None:
        """Look for padding in a batch, the keyword arguments of a forward.

        Args:
            is_sharded: ranks gather parameters together, and trace the same; each of them calls this.
        """
        if self._always:
            return
        self.has_padding = not all(map(is_known_true, _masks(inputs).values()))
        if is_sharded:
            self.has_padding = any(of_all_ranks(self.has_padding))
        self._always = self._is_first and self.has_padding
        self._is_first = False

    def expect_padding(self) -> None:
        """Count all batches to come as ones with padding."""
        self.has_padding = self._always = True

    @contextlib.contextmanager
    def around_call(self, args: Sequence[Any], inputs: Mapping[str, Any], drops_cache: bool) -> Iterator[None]:
        """A forward with these arguments is traced without the masks that it does not need.

        Args:
            drops_cache: the model is told to make no cache of keys and values; where there is one, transformers does
                not look for packed rows.
        """
        masks = [] if self.has_padding else list(_masks(inputs).values())
        has_caches = drops_cache and all(_makes_cache(module) for module in self._makers)
        is_in_order = self._numbers_tokens and not _may_be_packed(args, inputs)
        replaced = self._functions(has_caches or is_in_order)
        file: Any = importlib.import_module(_FILE)
        before = {name: getattr(file, name) for name in replaced}
        try:
            for mask in masks:
                setattr(mask, _MARK, True)
            vars(file).update(replaced)
            yield
        finally:
            vars(file).update(before)
            for mask in masks:
                vars(mask).pop(_MARK, None)

    def _functions(self, is_in_order: bool) -> dict[str, Callable[..., Any]]:
        """Replacements for functions of transformers, by their names there; the same in each call, since torch has
        guards on them."""
        if is_in_order not in self._replaced:
            file: Any = importlib.import_module(_FILE)
            made: dict[str, Callable[[Any], Callable[..., Any]]] = {
                _PREPARES: _without_full_mask,
                _CAUSAL: _if_not_local,
                _BIDIRECTIONAL: _if_not_local,
                _IS_EXPORTING: _unless_traced,
            }
            if is_in_order:
                made[_FINDS_PACKED] = _unless_traced
            self._replaced[is_in_order] = {
                name: make(getattr(file, name)) for name, make in made.items() if hasattr(file, name)
            }
        return self._replaced[is_in_order]


def without_padding(inputs: Mapping[str, Any]) -> Iterator[str]:
    """Names of the masks among a forward's inputs that mark no padding, as far as it is known."""
    return (name for name, mask in _masks(inputs).items() if is_known_true(mask))


def _masks(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in inputs.items() if is_mask(name) and isinstance(value, torch.Tensor)}
    return {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2}


def _may_be_packed(args: Sequence[Any], inputs: Mapping[str, Any]) -> bool:
    """True where a forward may be given position ids, or compute them of images."""
    has_images = any(
        isinstance(value, torch.Tensor) and value.is_floating_point() and name != "inputs_embeds"
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


def _names(function: Any) -> set[str]:
    return set() if function is None else set(function.__code__.co_names)


def _is_from(function: Any, places: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(places)


def _without_full_mask(before: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def prepared(config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        is_ready, mask, *sizes = before(config, inputs_embeds, attention_mask, *args, **kwargs)
        is_full = isinstance(attention_mask, torch.Tensor) and hasattr(attention_mask, _MARK)
        return (is_ready, None if is_full and not is_ready else mask, *sizes)

    return prepared


def _if_not_local(before: Callable[..., bool]) -> Callable[..., bool]:
    """Masks of local attention stay in a trace: its length, which decides, is one of many."""

    def is_ignored(*args: Any) -> bool:
        return not (args[-1] is not None and torch.compiler.is_compiling()) and before(*args)

    return is_ignored


def _unless_traced(before: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is exported or packed within a trace; other threads' forwards are theirs."""

    def asked(*args: Any) -> Any:
        return None if torch.compiler.is_compiling() else before(*args)

    return asked
