"""Watches a forward while it is exported, for values that ONNX Runtime would train or keep wrongly.

The TorchScript exporter drops `detach`, `.data` and `torch.no_grad()`, and ONNX Runtime differentiates through them:
the loss is right, gradients are not. And it keeps what Python reads of a tensor (`item()`, a condition, a length) as a
constant of the first batch. Neither is visible in the exported graph, so the forward's calls are followed instead, as
torch functions. There are three sets of tensors:

- *given*: their values depend on the batch, or on a trained parameter;
- *trained*: their gradients reach a trained parameter;
- *cut*: computed from a trained tensor without its gradient.

A result belongs to the sets of its operands; results that are no floating point numbers have no gradient, and sizes
depend on no value. A cut tensor among the forward's outputs, and a value that is read of a given tensor, are refused.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from optimum_memopt.compat.torch import tensors_in
from optimum_memopt.engines.ort.checks import UnsupportedByOrt

_CUTS = frozenset({"detach", "detach_"})
_READS = frozenset(
    {"__bool__", "__float__", "__index__", "__int__", "__len__", "__array__", "item", "numpy", "tolist"}
)
# Functions and properties of a tensor that depend on none of its values.
_OF_SIZES = frozenset({"dim", "ndim", "nelement", "numel", "shape", "size", "storage_offset", "stride"})


class _Values(TorchFunctionMode):
    """Follows the values of a module's forward.

    Attributes:
        why: why ONNX Runtime cannot train the forward; empty if it can.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.why = ""
        self._given, self._trained, self._cut = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._module, self._is_running, self._without_gradients = module, False, 0

    def begin(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._is_running = True
        for tensor in tensors_in([args, kwargs]):
            # ORT passes Python's numbers as tensors without dimensions. Another truth value is another graph, another
            # number is not (`PrimitiveType` in `training/utils/torch_io_helper.py`, 1.19.2).
            if tensor.dim() or tensor.dtype != torch.bool:
                self._given[tensor] = True
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                self._given[parameter] = self._trained[parameter] = True

    def end(self, module: torch.nn.Module, args: Any, outputs: Any) -> None:
        self._is_running = False
        if any(tensor in self._cut for tensor in tensors_in(outputs)):
            self._note("an output depends on a trained tensor by detach, .data or torch.no_grad()")

    @contextlib.contextmanager
    def no_grad_counted(self) -> Iterator[None]:
        """Returns a context that counts the forward's `torch.no_grad` blocks: the exporter has switched gradients off
        already."""
        enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__

        def entering(block: torch.no_grad) -> None:
            self._without_gradients += self._is_running
            enter(block)

        def leaving(block: torch.no_grad, *error: Any) -> None:
            self._without_gradients -= self._is_running
            leave(block, *error)

        with mock.patch.multiple(torch.no_grad, __enter__=entering, __exit__=leaving):
            yield

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_running:
            return function(*args, **kwargs)
        # A property's getter is named after the property.
        name = getattr(getattr(function, "__self__", None), "__name__", "") or getattr(function, "__name__", "")
        operands = list(tensors_in([args, kwargs]))
        if name in _READS and operands and operands[0] in self._given and not _is_of_onnxruntime():
            self._note(
                f"it reads the value of a tensor ({name.strip('_')}), which the graph would keep for all batches"
            )
        result = function(*args, **kwargs)
        if name in _OF_SIZES:
            return result
        of = (self._given, self._trained, self._cut)
        is_given, is_trained, is_cut = (any(tensor in each for tensor in operands) for each in of)
        cuts = self._without_gradients > 0 or name in _CUTS or name == "data"
        for tensor in tensors_in([operands[0]] if name == "__setitem__" else result):
            is_differentiable = tensor.is_floating_point() or tensor.is_complex()
            if is_given:
                self._given[tensor] = True
            if is_trained and is_differentiable and not cuts:
                self._trained[tensor] = True
            if is_differentiable and (is_cut or (is_trained and cuts)):
                self._cut[tensor] = True
        return result

    def _note(self, why: str) -> None:
        self.why = self.why or why


def _is_of_onnxruntime() -> bool:
    """True if the code that calls a torch function belongs to ONNX Runtime, whose hooks inspect the batch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "onnxruntime"


@contextlib.contextmanager
def refuse_wrong_values(module: torch.nn.Module) -> Iterator[None]:
    """Returns a context for a traced forward that follows its values.

    Raises:
        UnsupportedByOrt: ONNX Runtime would compute other gradients, or keep a value of the first batch.
    """
    values = _Values(module)
    hooks = (
        module.register_forward_pre_hook(values.begin, with_kwargs=True),
        module.register_forward_hook(values.end),
    )
    try:
        with values, values.no_grad_counted():
            yield
    finally:
        for hook in hooks:
            hook.remove()
    if values.why:
        raise UnsupportedByOrt(values.why)
