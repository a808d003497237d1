"""Moves the Trainer's loss into the model's forward: the Trainer's side of `--ort_module_with_loss`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optimum_memopt.engines.base import Engine, engine_of
from optimum_memopt.engines.ort.module_with_loss import LabelSmoothing
from optimum_memopt.errors import MemOptError


def check(trainer: Trainer) -> None:
    """Refuse a Trainer whose loss is code that the model does not know.

    Raises:
        MemOptError: `compute_loss_func`, or a `compute_loss` of its own.
    """
    if trainer.compute_loss_func is not None:
        raise MemOptError(
            "--ort_module_with_loss with compute_loss_func: that function reads the model's outputs outside of ONNX "
            "Runtime; leave out one of the two, or compute this loss in the model's forward"
        )
    if "compute_loss" in vars(trainer) or type(trainer).compute_loss is not Trainer.compute_loss:
        raise MemOptError(
            f"--ort_module_with_loss with {type(trainer).__name__}'s own compute_loss: it computes the loss outside "
            "of ONNX Runtime, from outputs that would not be there; leave out one of the two, or compute this loss in "
            "the model's forward"
        )


def inside(trainer: Trainer, engine: Engine) -> Callable[..., Any]:
    """`compute_loss` that leaves label smoothing to the engine in training.

    With a smoother the Trainer (transformers 5.23) takes the labels out of the inputs and computes the loss from the
    returned logits; without one it returns the model's loss, which is the smoothed one then.
    """
    compute_loss = trainer.compute_loss

    @functools.wraps(compute_loss)
    def compute(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        smoother, own = trainer.label_smoother, trainer.accelerator.unwrap_model(model)
        in_training = model.training and torch.is_grad_enabled()
        if smoother is None or not in_training or engine_of(own) is not engine:
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
