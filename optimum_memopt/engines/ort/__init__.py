"""The ort engine: ONNX Runtime Training's ORTModule and its C++ memory optimizer, in place, on today's torch.

Importing this package imports nothing of onnxruntime; `OrtEngine.attach` does.
"""

import os
from typing import Any

from optimum_memopt.engines.base import Engine, Selection, installed_version
from optimum_memopt.logs import get_logger, set_log_level
from optimum_memopt.plans.grammar import ConfigError

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


def declines(options: Any) -> str:
    """Which of the user's options, a `MemOptOptions`, ask for what this engine does not do; empty when none."""
    from optimum_memopt.engines.ort.selection import check_supported

    if options.memory_opt_compiler is not None:
        return f"--memory_opt_compiler {options.memory_opt_compiler} is for the compile engine"
    try:
        if (config := options.plan_config) is not None:
            check_supported(config)
    except ConfigError as error:
        return str(error)
    return ""


def create(options: Any) -> Engine:
    """An engine with the user's options, a `MemOptOptions`, as ORT's variables in the environment change them.

    Raises:
        MemOptError: a variable has a value that is not allowed.
    """
    from optimum_memopt.engines.ort.engine import OrtEngine
    from optimum_memopt.engines.ort.env_options import from_environment

    chosen, remarks = from_environment(options, os.environ)
    if chosen.memory_opt_log_level != options.memory_opt_log_level:
        set_log_level(chosen.memory_opt_log_level)
    for remark in remarks:
        get_logger().warning(remark)
    if options.memory_opt_engine == "auto":
        # What this engine cannot train another one does.
        chosen.ort_fallback = False
    selection = Selection(chosen.plan_config, chosen.memory_opt_level, chosen.memory_opt_strict)
    return OrtEngine(selection, chosen, chosen.memory_opt_log_level)
