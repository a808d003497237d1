"""Moves the loss into the graph that ONNX Runtime runs, and exploits the sparsity of the labels there.

A model that gets labels computes its loss inside its forward, and so in ORT. Two things are left out: the Trainer's
label smoothing, which removes the labels from the model's inputs, and the sparsity of the labels, since a row with an
ignored label needs no logits. With the loss in the graph, ShrunkenGather selects the labelled rows before the loss.
ORT's compute optimizer moves this operator up through the projection to the vocabulary, so that projection, loss and
their gradients run on labelled rows only.

ORT itself inserts ShrunkenGather (`InsertGatherBeforeSceLoss`, 1.19.2) only after a marker that needs its torch
extensions and an `nn.CrossEntropyLoss` submodule, which transformers' models do not have.
"""

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from optimum_memopt.engines.shared.label_smoothing import LabelSmoothing, logits_of
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger

_ROWS = "optimum_memopt::rows"


def with_label_smoothing(
    forward: Callable[..., Any], smoothing: LabelSmoothing | None, sparse: bool = False
) -> Callable[..., Any]:
    """Returns a bound forward with the smoothed loss in its outputs; unchanged without smoothing.

    Args:
        sparse: compute the loss on the labelled rows only.
    """
    if smoothing is None:
        return forward
    return smoothing.wrap(forward, functools.partial(_sparse_smoothed_loss, smoothing) if sparse else None)


def return_loss_only(module: torch.nn.Module, smoothing: LabelSmoothing | None, sparse: bool) -> None:
    """Make the forward of this instance return only its loss. Other outputs would stay alive, including all rows of
    the logits.

    Args:
        sparse: compute the loss on the labelled rows only, if there is a label per token.
    """
    own: Any = module.forward
    signature = inspect.signature(own)
    forward = with_label_smoothing(own, smoothing)
    sparse_forward = with_label_smoothing(own, smoothing, sparse=True)

    @functools.wraps(own.__func__)
    def loss_only(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        labels = signature.bind(*args, **kwargs).arguments.get("labels", kwargs.get("labels"))
        # With one label per sequence, labels are rarely ignored, and the classifier is small.
        per_token = isinstance(labels, torch.Tensor) and labels.dim() > 1
        if sparse and per_token:
            with _sparse_cross_entropy():
                outputs = sparse_forward(*args, **kwargs)
        else:
            outputs = forward(*args, **kwargs)
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            return type(outputs)(loss=outputs["loss"])
        if isinstance(outputs, tuple) and labels is not None:
            return outputs[:1]
        get_logger().warning(
            "--ort_module_with_loss: the model returned no loss for this batch; its outputs are unchanged"
        )
        return outputs

    module.forward = types.MethodType(loss_only, module)


class LabelShapes:
    """Checks that labels have the shape of their inputs, which ORT cannot check without all rows of the logits."""

    def __init__(self, is_encoder_decoder: bool) -> None:
        self._input_name = "decoder_input_ids" if is_encoder_decoder else "input_ids"
        self._agreed_at_first: bool | None = None

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse labels whose shape differs from their inputs', if they agreed in the first batch, which the model
        checked itself. Raises MemOptError."""
        labels, labelled = inputs.get("labels"), inputs.get(self._input_name)
        if not isinstance(labels, torch.Tensor) or not isinstance(labelled, torch.Tensor):
            return
        if labels.dim() < 2 or labels.is_floating_point():
            return
        agree = labels.shape == labelled.shape
        if self._agreed_at_first is None:
            self._agreed_at_first = agree
        if self._agreed_at_first and not agree:
            raise MemOptError(
                f"labels of shape {tuple(labels.shape)} for {self._input_name} of shape {tuple(labelled.shape)}: each "
                "token needs a label, -100 where it does not count"
            )


@contextlib.contextmanager
def exportable(opset: int) -> Iterator[None]:
    """Returns a context in which `torch.onnx.export` has a symbolic for the row selection."""

    def shrunken_gather(graph: Any, tensor: Any, rows: Any) -> Any:
        # ORT's compute optimizer moves a ShrunkenGather, but a Gather only if its size is known.
        selected = graph.op("com.microsoft::ShrunkenGather", tensor, rows, axis_i=0)
        sizes = tensor.type().sizes()
        if sizes is not None:
            selected.setType(tensor.type().with_sizes([None, *sizes[1:]]))
        return selected

    torch.onnx.register_custom_op_symbolic(_ROWS, shrunken_gather, opset)
    try:
        yield
    finally:
        torch.onnx.unregister_custom_op_symbolic(_ROWS, opset)


@torch.library.custom_op(_ROWS, mutates_args=())
def _exported_rows(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, rows)


def _select_labelled_rows(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of logits (rows, classes) and labels (rows,) whose label is not ignored, and always the first
    row: ORT 1.19.2 crashes on a projection of no rows."""
    counted = labels.ne(ignore_index)
    rows = torch.cat([torch.ones_like(counted[:1]), counted[1:]]).nonzero().squeeze(1)
    if torch.onnx.is_in_onnx_export():
        return _exported_rows(logits, rows), _exported_rows(labels, rows)
    return logits.index_select(0, rows), labels.index_select(0, rows)


def _sparse_smoothed_loss(smoothing: LabelSmoothing, outputs: Any, labels: torch.Tensor, items: Any) -> torch.Tensor:
    # Shift the labels: the smoother would slice off the last row of the logits, and the row selection cannot be moved
    # past a slice.
    logits, labels = logits_of(outputs), smoothing.shifted(labels)
    flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    logits, labels = _select_labelled_rows(*flat, smoothing.ignore_index)
    return smoothing.smoother({"logits": logits}, labels, num_items_in_batch=items)


@contextlib.contextmanager
def _sparse_cross_entropy() -> Iterator[None]:
    """Returns a context in which `torch.nn.functional.cross_entropy`, which every transformers loss calls, uses the
    labelled rows only, on this thread."""
    original = functional.cross_entropy
    thread = threading.get_ident()
    signature = inspect.signature(original)

    @functools.wraps(original)
    def cross_entropy(*args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = types.SimpleNamespace(**bound.arguments)
        fits = call.input.dim() == 2 and call.target.dim() == 1 and call.input.shape[0] == call.target.shape[0]
        if fits and call.reduction in ("mean", "sum") and call.size_average is None and call.reduce is None:
            call.input, call.target = _select_labelled_rows(call.input, call.target, call.ignore_index)
        return original(**vars(call))

    with mock.patch.object(functional, "cross_entropy", cross_entropy):
        yield
