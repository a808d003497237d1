"""Python that runs on fake tensors as it would on real ones (`torch/_subclasses/fake_tensor.py`, 2.13).

What branches on values does so on those that are known: of tensors with a `constant`, of what is drawn or made of
numbers alone, and of what small operators make of these.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# A value, or a shape that depends on values, is not known.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
# Elements of tensors whose values are followed: ids and masks of a batch.
_MOST_VALUES = 2**20
_aten = torch.ops.aten


@dataclass(frozen=True)
class HeldStorage:
    """The memory of a tensor, which a fake one has, too.

    Attributes:
        address: unique among the storages that are alive.
    """

    storage: torch.UntypedStorage

    @property
    def address(self) -> int:
        return self.storage._cdata

    @property
    def bytes(self) -> int:
        return self.storage.nbytes()

    def on_release(self, call: Callable[[int], None]) -> None:
        """Call with the address when nobody holds it any more."""
        weakref.finalize(self.storage, call, self.address).atexit = False


def storages(tensor: torch.Tensor) -> list[HeldStorage]:
    """Several of a tensor subclass that is made of others."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [storage for name in names for storage in storages(getattr(tensor, name))]
    return [HeldStorage(tensor.untyped_storage())]


@contextlib.contextmanager
def run_as_eager() -> Iterator[None]:
    """Models do not take this for tracing, and values of small tensors are followed.

    transformers builds other masks where it is traced (`is_tracing`, 5.23); checks of values pass.
    """
    from transformers.utils import import_utils

    def passes(*_: Any) -> None:
        pass

    replaced = (
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST_VALUES),
        (import_utils, "is_fake_tensor", lambda _: False),
        (torch, "_check_tensor_all", passes),
        (torch, "_check_tensor_all_with", passes),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def replace_subclasses(copied: torch.nn.Module, model: torch.nn.Module) -> None:
    """Plain fake parameters, with their attributes, for those of a subclass: bitsandbytes' `Params4bit` (0.50) is
    copied to the meta device.

    Args:
        copied: of `model`, in the mode of its tensors.
    """
    for module, original in zip(copied.modules(), model.modules(), strict=True):
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, FakeTensor) or is_traceable_wrapper_subclass(parameter):
                continue
            source = original._parameters[name]
            assert source is not None
            tensor = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=source.device)
            plain = torch.nn.Parameter(tensor, source.requires_grad)
            for key, value in vars(parameter).items():
                setattr(plain, key, value)
            module._parameters[name] = plain


def with_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Models that branch on values of a fake tensor find these."""
    if isinstance(tensor, FakeTensor):
        tensor.constant = values


def with_padding(mask: torch.Tensor) -> None:
    """The last token of the last row is padding, where no values of the mask are known."""
    if isinstance(mask, FakeTensor) and mask.constant is None and mask.dim() == 2:
        with unset_fake_temporarily():
            values = torch.ones(mask.shape, dtype=mask.dtype)
            values[-1:, -1:] = 0
        mask.constant = values


def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on fake tensors as if every element of a mask were chosen, which is the most that can be.

    Raises:
        DataDependentOutputException: a value is read that is not known.
        DynamicOutputShapeException: a shape depends on values, and no bound of it is known.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return _made(function, args, kwargs)
    if any(getattr(tensor, "constant", None) is None for tensor in tensors):
        if function is _aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        if function is _aten.masked_select.default:
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        if function is _aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            args = (args[0], [chosen for index in args[1] for chosen in _indices(index)])
    if function is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        # Its meta function takes bfloat16 alone, the kernels more.
        halves = (argument.bfloat16() if _is_float(argument) else argument for argument in args)
        return torch.empty_like(function(*halves, **kwargs), dtype=args[0].dtype)
    return function(*args, **kwargs)


def _made(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    results = function(*args, **kwargs)
    if isinstance(results, FakeTensor) and results.constant is None and results.numel() <= _MOST_VALUES:
        with unset_fake_temporarily():
            results.constant = function(*args, **kwargs)
    return results


def _is_float(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.is_floating_point()


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _indices(index: Any) -> list[Any]:
    if not _is_mask(index):
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
