"""ONNX Runtime's own optimizers: FusedAdam as a value of `--memory_opt_optim`, and `FP16_Optimizer`.

`FP16_Optimizer` gives fp16 optimizers faster overflow checks and norms. It replaces methods of the optimizer that it
is given, and only of optimizers that it knows: of DeepSpeed ZeRO 1 and 2 from 0.4.0 to 0.9.1 any, later ones where the
source of three methods is that of 0.9.2 (`_ds_modifier.py` in onnxruntime-training 1.19.2; the last is 0.13.1), of
Apex with `amp`, of Megatron-LM 1.1.5; on CUDA only. Everywhere else it warns deep in a log and does nothing, which is
said here instead.
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
    """True where ONNX Runtime's CUDA extension for FusedAdam and FP16_Optimizer is built. Imports onnxruntime."""
    ortmodule.load()
    return importlib.util.find_spec(f"{extensions.PACKAGE}.fused_ops") is not None


def fused_adam_missing(device: str) -> str:
    """Why FusedAdam cannot run on this device type, with a suggestion; empty when it can."""
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
    """The class, and the arguments that make it torch's AdamW."""
    ortmodule.load()
    optim = importlib.import_module("onnxruntime.training.optim")
    # Its default is the AdamW that transformers once had, which decays after the step.
    return optim.FusedAdam, {"adam_w_mode": optim.AdamWMode.ADAMW_TORCH}


def fp16_optimizer_callbacks(trainer: Trainer) -> tuple[TrainerCallback, ...]:
    """The callback that applies `modify_fp16_optimizer` when a run begins; none where the Trainer has it.

    Raises:
        MemOptError: onnxruntime-training is not installed.
    """
    if reason := missing():
        raise MemOptError(f"{FLAG}: {reason}")
    has_one = any(isinstance(callback, Fp16OptimizerCallback) for callback in trainer.callback_handler.callbacks)
    return () if has_one else (Fp16OptimizerCallback(),)


def modify_fp16_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Give a fp16 optimizer, as `accelerator.prepare` or DeepSpeed returned it, ONNX Runtime's methods, in place.

    Returns:
        Why ONNX Runtime left the optimizer as it is; empty when it did not.
    """
    has_operators = has_fused_ops()
    wrap = importlib.import_module("onnxruntime.training.optim").FP16_Optimizer
    # accelerate puts a wrapper around DeepSpeed's optimizer, which ONNX Runtime looks through.
    candidates = [optimizer, *([optimizer.optimizer] if hasattr(optimizer, "optimizer") else [])]
    before = [dict(vars(each)) for each in candidates]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrap(optimizer)
        except AttributeError as error:
            # It compares methods by source, which a later DeepSpeed may have no more.
            return str(error)
    said = [str(warning.message) for warning in caught]
    if not any("are overridden with faster implementation" in text for text in said):
        # The last one is the verdict, those before it list source code.
        reasons = [text.splitlines()[0] for text in said if "Skip modifying optimizer" in text]
        return reasons[-1] if reasons else f"it does not know {type(optimizer).__name__}"
    if not has_operators:
        for each, attributes in zip(candidates, before, strict=True):
            vars(each).clear()
            vars(each).update(attributes)
        return "its torch extension fused_ops, which the new methods call, is not built here"
    return ""


class Fp16OptimizerCallback(TrainerCallback):
    """Applies `modify_fp16_optimizer` when a run begins, when DeepSpeed's optimizer first exists."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        reason = modify_fp16_optimizer(kwargs["optimizer"]) if args.fp16 else "this run is not in fp16 (--fp16)"
        if reason:
            get_logger().warning(
                f"{FLAG}: the optimizer stays as it is; ONNX Runtime's FP16_Optimizer knows DeepSpeed 0.4.0 to 0.13.1 "
                f"and Apex, in fp16 on CUDA: {reason}"
            )
        else:
            get_logger().info("the optimizer has ONNX Runtime's FP16_Optimizer")
