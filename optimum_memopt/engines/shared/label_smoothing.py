"""Moves the Trainer's label smoothing into the model's forward, so that an engine computes the loss.

With a label smoother the Trainer (transformers 5.23) removes the labels from the model's inputs and computes the loss
from the returned logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optimum_memopt.engines.api.engine import Engine
from optimum_memopt.engines.shared.in_place import engine_of

# Predictions do not need the Trainer, whose import loads PEFT and bitsandbytes and takes three seconds.
if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother


@dataclass(frozen=True)
class LabelSmoothing:
    """A smoothed loss, computed from the logits instead of the model's own.

    Attributes:
        smoother: transformers' `LabelSmoother`.
        shift_labels: the logits of a token predict the next label (causal language models).
    """

    smoother: Callable[..., torch.Tensor]
    shift_labels: bool

    @property
    def ignore_index(self) -> int:
        """Returns the label of tokens that the loss ignores."""
        return getattr(self.smoother, "ignore_index", -100)

    def shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the label for each token's logits; the last token of a causal model has none."""
        if not self.shift_labels:
            return labels
        return torch.nn.functional.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]

    def loss(self, outputs: Any, labels: torch.Tensor, items: Any) -> torch.Tensor:
        """Returns the smoothed loss as `Trainer.compute_loss` computes it."""
        return self.smoother(outputs, labels, shift_labels=self.shift_labels, num_items_in_batch=items)

    def wrap(
        self, forward: Callable[..., Any], loss: Callable[[Any, torch.Tensor, Any], torch.Tensor] | None = None
    ) -> Callable[..., Any]:
        """Returns `forward` with the smoothed loss in its outputs if `labels` are given.

        Args:
            forward: takes `labels` by name, returns logits of shape (…, classes) as `logits` or as the first output.
            loss: computes the smoothed loss from outputs, labels and `num_items_in_batch`; None: `self.loss`.
        """

        def smoothed(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if labels is None:
                return outputs
            value = (loss or self.loss)(outputs, labels, kwargs.get("num_items_in_batch"))
            if isinstance(outputs, dict):
                outputs["loss"] = value
                return outputs
            return value, *outputs

        return smoothed


def logits_of(outputs: Any) -> torch.Tensor:
    """Returns the logits of a forward without labels."""
    return outputs["logits"] if isinstance(outputs, dict) else outputs[0]


def cross_entropy(smoothing: LabelSmoothing, outputs: Any, labels: torch.Tensor, items: Any) -> torch.Tensor:
    """Returns the loss of transformers' `LabelSmoother`, computed with torch's `cross_entropy`, which the compile
    engine recognizes."""
    logits = logits_of(outputs)
    loss = torch.nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]),
        smoothing.shifted(labels).reshape(-1),
        ignore_index=smoothing.ignore_index,
        reduction="mean" if items is None else "sum",
        label_smoothing=cast("LabelSmoother", smoothing.smoother).epsilon,
    )
    return loss if items is None else loss / items


def smoothed_by_engine(trainer: "Trainer", engine: Engine, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `compute_loss` with label smoothing left to the engine in training, if the engine supports it.

    Without a smoother, `compute_loss` returns the model's loss, which the engine has smoothed.
    """

    def compute(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        smoother, own = trainer.label_smoother, trainer.accelerator.unwrap_model(model)
        trains = torch.is_grad_enabled() and engine_of(own) is engine
        if smoother is None or not trains:
            if trains:
                # A smoother that was removed after an earlier `train()`.
                engine.smooth_labels(None)
            return compute_loss(model, *args, **kwargs)
        wrapped = own.get_base_model() if hasattr(own, "get_base_model") else own
        shifts = type(wrapped).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if not engine.smooth_labels(LabelSmoothing(smoother, shifts)):
            return compute_loss(model, *args, **kwargs)
        trainer.label_smoother = None
        try:
            return compute_loss(model, *args, **kwargs)
        finally:
            trainer.label_smoother = smoother

    return compute
