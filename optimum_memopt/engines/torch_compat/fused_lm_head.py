"""The language-model head of TRL's trainers (1.16), which computes the log probabilities of labels in chunks, as one
operator.

TRL's is an `autograd.Function` that writes matrix products into parts of a buffer; on GPUs it uses Triton kernels, and
computes only tokens with a label (`trl/kernels/chunked_logprob.py`, `add_fused_lm_head` in `trl/trainer/utils.py`).
It breaks the graph. The operator runs that function's own forward and backward.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from optimum_memopt.engines.torch_compat.fx_graph import LIBRARY
from optimum_memopt.engines.torch_compat.patches import Name, Patch

_KERNELS, _USES = "trl.kernels.chunked_logprob", "trl.trainer.utils"
_FUNCTION, _IS_TRITON = "_ChunkedLogProbFunction", "_use_triton"
# Parameters of the function's forward; other releases of TRL may have others.
_ARGUMENTS = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
HEAD = Patch(
    "the head of TRL's trainers, as one operator",
    "TRL's chunked loss breaks the graph, and its memory is predicted too low",
    "trl",
    since="1.12",
    tested="1.16",
    names=(
        Name(_KERNELS, "ChunkedLogProbFunction.forward", _ARGUMENTS),
        Name(_KERNELS, "_use_triton", ("device",)),
        Name(_KERNELS, "TOKEN_CHUNK_SIZE"),
        Name(_USES, _FUNCTION),
        Name(_USES, _IS_TRITON),
    ),
)
# The function's results after the log probabilities, computed if requested.
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@torch.library.custom_op(f"{LIBRARY}::label_log_probs", mutates_args=())
def label_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    outputs: str,
    autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns log probabilities of labels in float32, logarithms of the softmax's sums, and requested outputs.

    Args:
        hidden: [tokens, units].
        weight: [vocabulary, units].
        labels: [tokens]; a negative value means no label.
        outputs: names of `_OUTPUTS`, separated by commas.
        autocast: the dtype of autocast; None if it is off.

    Returns:
        Tensors of shape [tokens], empty if not requested. Values of tokens without a label are arbitrary.
    """
    function, scored = _function(), _scored(labels)
    context, asked = FunctionCtx(), tuple(filter(None, outputs.split(",")))
    given = (_picked(hidden, scored), weight, bias, _picked(labels, scored).clamp(min=0))
    with _autocast(hidden, autocast):
        log_probs, *others = function.forward(context, *given, temperature, chunk_size, softcap, scale, asked)
    log_z = context.to_save[4]
    results = (None if each is None else _spread(each, scored) for each in (log_probs, log_z, *others))
    return tuple(log_probs.new_empty(0) if each is None else each for each in results)  # type: ignore[return-value]


@label_log_probs.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, temperature: float, chunk_size: int,
    softcap: float | None, scale: float, outputs: str, autocast: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    def result(name: str = "") -> Tensor:
        dtype = torch.bool if name == "is_top1" and name in outputs else torch.float32
        return hidden.new_empty((labels.shape[0] if name in outputs else 0,), dtype=dtype)

    return result(), result(), *map(result, _OUTPUTS)


@torch.library.custom_op(f"{LIBRARY}::label_log_probs_backward", mutates_args=())
def label_log_probs_backward(
    gradient: Tensor | None,
    of_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    log_z: Tensor,
    entropy: Tensor,
    temperature: float,
    chunk_size: int,
    softcap: float | None,
    scale: float,
    autocast: torch.dtype | None,
    needed: Sequence[bool],
) -> list[Tensor]:
    """Returns the needed gradients of hidden states, weight and bias.

    Args:
        gradient, of_entropy: [tokens], gradients of the log probabilities and of the entropies.
    """
    function, scored = _function(), _scored(labels)
    context: Any = FunctionCtx()
    with _autocast(hidden, autocast):
        # Without tokens nothing is computed, but the context gets the attributes that the backward reads.
        function.forward(context, hidden[:0], weight, bias, labels[:0], temperature, chunk_size, softcap, scale, ())
    hidden, labels, log_z, entropy = (_picked(each, scored) for each in (hidden, labels, log_z, entropy))
    context.saved_tensors = (hidden, weight, bias, labels.clamp(min=0), log_z, entropy)
    context.needs_input_grad = needed
    gradients = (None if each is None else _picked(each, scored) for each in (gradient, of_entropy))
    of_hidden, *others = function.backward(context, *gradients)[:3]
    results = (None if of_hidden is None else _spread(of_hidden, scored), *others)
    return [each for each in results if each is not None]


@label_log_probs_backward.register_fake
def _(
    gradient: Tensor | None, of_entropy: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    labels: Tensor, log_z: Tensor, entropy: Tensor, temperature: float, chunk_size: int, softcap: float | None,
    scale: float, autocast: torch.dtype | None, needed: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    wanted = (each for each, is_needed in zip((hidden, weight, bias), needed, strict=True) if is_needed)
    return [each.new_empty(each.shape) for each in wanted if each is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, temperature, chunk_size, softcap, scale, outputs, autocast = inputs
    _, log_z, entropy, *_ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, log_z, entropy if "entropy" in outputs else log_z)
    ctx.given = temperature, chunk_size, softcap, scale, autocast
    ctx.has_entropy = "entropy" in outputs


def _backward(ctx: Any, gradient: Tensor | None, _: Any, of_entropy: Tensor | None, *__: Any) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:3])
    of_entropy = of_entropy if ctx.has_entropy else None
    found = iter(label_log_probs_backward(gradient, of_entropy, *ctx.saved_tensors, *ctx.given, needed))
    return *(next(found) if is_needed else None for is_needed in needed), *(None,) * 7


label_log_probs.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.optimum_memopt.label_log_probs)
def _flops(hidden: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]


@register_flop_formula(torch.ops.optimum_memopt.label_log_probs_backward)
def _flops_of_backward(
    gradient: Any, of_entropy: Any, hidden: Sequence[int], weight: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    # The products again, and one for each gradient.
    return 3 * _flops(hidden, weight)


class LabelLogProbs:
    """Replaces TRL's function in a trace: its `apply` calls the operator."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        given = (hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs)
        # A weight that DeepSpeed has yet to gather has fewer dimensions.
        if not torch.compiler.is_compiling() or weight.dim() < 2:
            return self._function.apply(*given)
        device = hidden.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        numbers = (float(temperature), chunk_size, softcap, float(scale))
        log_probs, _, *others = label_log_probs(hidden, weight, bias, targets, *numbers, ",".join(outputs), autocast)
        return log_probs, *(each if name in outputs else None for name, each in zip(_OUTPUTS, others, strict=True))


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yields replacements in TRL's files; none if no trainer of TRL is imported, or the release does not match."""
    file: Any = sys.modules.get(_USES)
    if file is None or not HEAD.applies:
        return
    # Not the file's attributes, which may be replaced while another thread trains.
    function, uses = _function(), _kernels()._use_triton

    def is_triton(device: torch.device) -> bool:
        # The number of labels would be a symbol in a trace; the operator selects the tokens itself.
        return not torch.compiler.is_compiling() and bool(uses(device))

    yield file, _FUNCTION, LabelLogProbs(function)
    yield file, _IS_TRITON, is_triton


def with_labels(module: fx.GraphModule) -> None:
    """Pass the operator the original labels in a graph of dynamo, where TRL clamps negative ones to 0."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.optimum_memopt.label_log_probs.default):
        if labels := _unclamped(node.args[3]):
            with module.graph.inserting_before(node):
                node.update_arg(3, module.graph.call_method("reshape", (labels, -1)))
            module.recompile()


def _unclamped(targets: Any) -> fx.Node | None:
    """Returns the node of the labels that were clamped and reshaped to `targets`; None if there is none."""
    for name in ("reshape", "clamp"):
        if not isinstance(targets, fx.Node) or (targets.op, targets.target) != ("call_method", name):
            return None
        targets = targets.args[0]
    return targets if isinstance(targets, fx.Node) else None


def _kernels() -> Any:
    return importlib.import_module(_KERNELS)


def token_chunk() -> int:
    """Returns the number of tokens per chunk."""
    return int(_kernels().TOKEN_CHUNK_SIZE)


def _function() -> Any:
    return _kernels().ChunkedLogProbFunction


def _scored(labels: Tensor) -> Tensor | None:
    """Returns a mask [tokens] of the tokens to compute; None: all, as in TRL without Triton."""
    return labels >= 0 if _kernels()._use_triton(labels.device) else None


def _picked(tensor: Tensor, scored: Tensor | None) -> Tensor:
    return tensor if scored is None or not len(tensor) else tensor[scored]


def _spread(tensor: Tensor, scored: Tensor | None) -> Tensor:
    if scored is None:
        return tensor
    spread = tensor.new_zeros((len(scored), *tensor.shape[1:]))
    spread[scored] = tensor
    return spread


def _autocast(hidden: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(hidden.device.type, dtype, enabled=dtype is not None)
