"""The ort engine: ONNX Runtime Training's ORTModule and its C++ memory optimizer, in place, on today's torch.

Importing this package imports nothing of onnxruntime; `OrtEngine.attach` does.
"""

from typing import Any

from optimum_memopt.engines.base import Engine, Selection, installed_version

DISTRIBUTIONS = ("onnxruntime-training", "onnxruntime-training-cpu", "onnxruntime-training-rocm")


def missing() -> str:
    """Why this engine cannot work here and how to get it; empty when it can."""
    if installed_version(DISTRIBUTIONS) is None:
        return "onnxruntime-training is not installed; pip install 'optimum-memopt[ort]' (Python 3.12 or older)"
    if clash := installed_version(("onnxruntime", "onnxruntime-gpu")):
        return (
            f"the package {clash[0]} overwrites onnxruntime-training, both are imported as onnxruntime; "
            f"pip uninstall {clash[0]} and reinstall onnxruntime-training"
        )
    return ""


def create(options: Any) -> Engine:
    """An engine with the user's options, a `MemOptOptions`."""
    from .engine import OrtEngine, OrtSettings

    settings = OrtSettings(
        fallback=options.ort_fallback,
        arena=options.ort_arena,
        cache_dir=options.ort_cache_dir,
        save_onnx=options.ort_save_onnx,
        opset=options.ort_opset,
        log_level=options.memory_opt_log_level,
    )
    return OrtEngine(Selection(options.plan_config, options.memory_opt_level, options.memory_opt_strict), settings)
