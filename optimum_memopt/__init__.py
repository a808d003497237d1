"""Fit a training step into memory: recompute or offload saved activations by name or by layer, predict the peak.

Defines the public names. Each is imported on first use, so that importing the package is instant and does not import
onnxruntime or deepspeed.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimum_memopt.callbacks.input_density import InputDensityCallback
    from optimum_memopt.callbacks.memory_phases import MemoryPhasesCallback
    from optimum_memopt.callbacks.plan_stats import PlanStatsCallback
    from optimum_memopt.engines.api.engine import Engine
    from optimum_memopt.engines.compile.memory.footprint import Footprint
    from optimum_memopt.errors import MemOptError, UnsupportedModelError, run
    from optimum_memopt.loop import optimize
    from optimum_memopt.oom.guard import MemoryReportCallback
    from optimum_memopt.oom.report import MemoryReport
    from optimum_memopt.options import MemOptOptions
    from optimum_memopt.plans.grammar import ConfigError, PlanConfig, PlanRequest, Strategy
    from optimum_memopt.plans.table import PlanRow, PlanTable
    from optimum_memopt.predict.plan import Estimate, plan
    from optimum_memopt.predict.simulate import Simulation, simulate
    from optimum_memopt.trainer import Attachment, MemOptTrainer, attach, run_summary
    from optimum_memopt.trainer_args import MemOptTrainingArguments

    __version__: str

__all__ = [
    "Attachment",
    "ConfigError",
    "Engine",
    "Estimate",
    "Footprint",
    "InputDensityCallback",
    "MemOptError",
    "MemOptOptions",
    "MemOptTrainer",
    "MemOptTrainingArguments",
    "MemoryPhasesCallback",
    "MemoryReport",
    "MemoryReportCallback",
    "PlanConfig",
    "PlanRequest",
    "PlanRow",
    "PlanStatsCallback",
    "PlanTable",
    "Simulation",
    "Strategy",
    "UnsupportedModelError",
    "attach",
    "optimize",
    "plan",
    "run",
    "run_summary",
    "simulate",
]

# The imports above, for use at run time; tests/train/test_public_names.py compares the two.
_MODULES = {
    name: module
    for module, *names in (
        ("callbacks.input_density", "InputDensityCallback"),
        ("callbacks.memory_phases", "MemoryPhasesCallback"),
        ("callbacks.plan_stats", "PlanStatsCallback"),
        ("engines.api.engine", "Engine"),
        ("engines.compile.memory.footprint", "Footprint"),
        ("errors", "MemOptError", "UnsupportedModelError", "run"),
        ("loop", "optimize"),
        ("oom.guard", "MemoryReportCallback"),
        ("oom.report", "MemoryReport"),
        ("options", "MemOptOptions"),
        ("plans.grammar", "ConfigError", "PlanConfig", "PlanRequest", "Strategy"),
        ("plans.table", "PlanRow", "PlanTable"),
        ("predict.plan", "Estimate", "plan"),
        ("predict.simulate", "Simulation", "simulate"),
        ("trainer", "Attachment", "MemOptTrainer", "attach", "run_summary"),
        ("trainer_args", "MemOptTrainingArguments"),
    )
    for name in names
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("optimum-memopt")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
