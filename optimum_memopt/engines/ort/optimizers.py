"""ONNX Runtime's own optimizers: FusedAdam as a value of `--memory_opt_optim`, and `FP16_Optimizer`.

`FP16_Optimizer` makes the overflow checks and norms of fp16 optimizers faster, by replacing methods of the optimizer.
It supports these optimizers, on CUDA only:

- DeepSpeed ZeRO 1 and 2: every version from 0.4.0 to 0.9.1, and later ones if the source of three methods equals that
  of 0.9.2 (`_ds_modifier.py` in onnxruntime-training 1.19.2); the last such version is 0.13.1.
- Apex with `amp`.
- Megatron-LM 1.1.5.

For all others it warns deep in a log and does nothing; this module logs a warning instead.
"""

import importlib
import importlib.util
import warnings
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from optimum_memopt.engines.ort.compat import extensions, ortmodule
from optimum_memopt.engines.ort.compat.installation import missing
from optimum_memopt.errors import MemOptError
from optimum_memopt.logs import get_logger

FLAG = "--ort_fp16_optimizer"


def has_fused_ops() -> bool:
    """True if ONNX Runtime's CUDA extension for FusedAdam and FP16_Optimizer is built. Imports onnxruntime."""
    ortmodule.load()
    return importlib.util.find_spec(f"{extensions.PACKAGE}.fused_ops") is not None


def fused_adam_missing(device: str) -> str:
    """Returns why FusedAdam cannot run on this device type, with a suggestion; empty if it can."""
    if reason := missing():
        return reason
    if device != "cuda":
        return f"ONNX Runtime's FusedAdam runs on CUDA only, this run is on {device}; use torch_fused_adamw"
    if not has_fused_ops():
        return (
            "ONNX Runtime's FusedAdam needs its torch extension fused_ops, which is not built here; use "
            "deepspeed_fused_adam or torch_fused_adamw"
        )
    return ""


def fused_adam() -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Returns ONNX Runtime's FusedAdam, and the arguments with which it computes torch's AdamW."""
    ortmodule.load()
    optim = importlib.import_module("onnxruntime.training.optim")
    # The default is transformers' former AdamW, which decays weights after the step.
    return optim.FusedAdam, {"adam_w_mode": optim.AdamWMode.ADAMW_TORCH}


def fp16_optimizer_callbacks(trainer: Trainer) -> tuple[TrainerCallback, ...]:
    """Returns the callback that applies `modify_fp16_optimizer` when a run begins; empty if the Trainer has it.

    Raises:
        MemOptError: onnxruntime-training is not installed.
    """
    if reason := missing():
        raise MemOptError(f"{FLAG}: {reason}")
    has_one = any(isinstance(callback, Fp16OptimizerCallback) for callback in trainer.callback_handler.callbacks)
    return () if has_one else (Fp16OptimizerCallback(),)


def modify_fp16_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Replace methods of an fp16 optimizer by ONNX Runtime's, in place.

    Args:
        optimizer: the optimizer as returned by `accelerator.prepare` or DeepSpeed.

    Returns:
        Why the optimizer is unchanged; empty if it was modified.
    """
    has_operators = has_fused_ops()
    wrap = importlib.import_module("onnxruntime.training.optim").FP16_Optimizer
    # accelerate wraps DeepSpeed's optimizer; ONNX Runtime modifies the wrapped one.
    candidates = [optimizer, *([optimizer.optimizer] if hasattr(optimizer, "optimizer") else [])]
    before = [dict(vars(each)) for each in candidates]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrap(optimizer)
        except AttributeError as error:
            # ONNX Runtime compares the source of methods that a later DeepSpeed may not have.
            return str(error)
    said = [str(warning.message) for warning in caught]
    if not any("are overridden with faster implementation" in text for text in said):
        # The last warning is the verdict; earlier ones list source code.
        reasons = [text.splitlines()[0] for text in said if "Skip modifying optimizer" in text]
        return reasons[-1] if reasons else f"it does not support {type(optimizer).__name__}"
    if not has_operators:
        for each, attributes in zip(candidates, before, strict=True):
            vars(each).clear()
            vars(each).update(attributes)
        return "its torch extension fused_ops, which the new methods call, is not built here"
    return ""


class Fp16OptimizerCallback(TrainerCallback):
    """Applies `modify_fp16_optimizer` when a run begins: only then does DeepSpeed's optimizer exist."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        reason = modify_fp16_optimizer(kwargs["optimizer"]) if args.fp16 else "this run is not in fp16 (--fp16)"
        if reason:
            get_logger().warning(
                f"{FLAG}: the optimizer is unchanged, since ONNX Runtime's FP16_Optimizer supports DeepSpeed 0.4.0 to "
                f"0.13.1 and Apex, in fp16 on CUDA: {reason}"
            )
        else:
            get_logger().info("the optimizer is wrapped in ONNX Runtime's FP16_Optimizer")
