"""ONNX Runtime's FusedAdam as a value of `--memory_opt_optim`. Importing this imports nothing of onnxruntime."""

import importlib
import importlib.util
from typing import Any

import torch

from optimum_memopt.engines.ort.installed import missing as onnxruntime_missing
from optimum_memopt.engines.shared.optimizers import Provider, register_optimizer

NAME = "ort_fused_adam"
_FUSED_OPS = "onnxruntime.training.ortmodule.torch_cpp_extensions.fused_ops"


def register() -> None:
    """Make it a value of the flag."""
    register_optimizer(NAME, Provider(missing, load, needs="CUDA"))


def missing(device: str) -> str:
    """Why it cannot run on this device type and the way out, empty when it can. Imports onnxruntime on CUDA."""
    if reason := onnxruntime_missing():
        return reason
    if device != "cuda":
        return f"ONNX Runtime's FusedAdam runs on CUDA only, this run is on {device}; use torch_fused_adamw"
    if not has_fused_ops():
        return (
            "ONNX Runtime's FusedAdam needs its torch extension fused_ops, which is not built here; use "
            "deepspeed_fused_adam or torch_fused_adamw"
        )
    return ""


def has_fused_ops() -> bool:
    """Whether ONNX Runtime's CUDA extension for FusedAdam and FP16_Optimizer is built. Imports onnxruntime."""
    from optimum_memopt.engines.ort import compat

    compat.load()
    return importlib.util.find_spec(_FUSED_OPS) is not None


def load() -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class, and the arguments that make it torch's AdamW. Imports onnxruntime."""
    from optimum_memopt.engines.ort import compat

    compat.load()
    optim = importlib.import_module("onnxruntime.training.optim")
    # Its default is the AdamW that transformers once had, which decays after the step.
    return optim.FusedAdam, {"adam_w_mode": optim.AdamWMode.ADAMW_TORCH}
