"""Operators that this package defines; each registers what its calls take, since no table of torch has it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class OperatorSizes(Protocol):
    """Cost of one call of an operator; numbers may be symbolic.

    Attributes:
        workspace: bytes held while it runs, beside its results.
        moved: bytes read and written, beside its operands and results.
        flops: floating point operations.
        compute: the dtype of its products.
    """

    @property
    def workspace(self) -> Any: ...

    @property
    def moved(self) -> Any: ...

    @property
    def flops(self) -> Any: ...

    @property
    def compute(self) -> torch.dtype: ...


# Returns the sizes of a call from its positional arguments and whether it runs on CUDA, wherever its tensors are.
SizesOf = Callable[[Sequence[Any], bool], OperatorSizes]
_registered: dict[str, SizesOf] = {}


def register_sizes(operator: str, sizes: SizesOf) -> None:
    """Register the sizes of an operator, such as `optimum_memopt.chunked_loss.default`."""
    _registered[operator] = sizes


def sizes_of(operator: Any) -> SizesOf | None:
    """Returns the function registered for an operator; None for operators of torch."""
    return _registered.get(str(operator))
