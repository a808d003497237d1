"""See what a training step stashes, trade it for recompute by name or by layer, and see what was won.

The public names; each is imported when it is first used, so that this import brings neither onnxruntime nor deepspeed.
"""

import importlib
from typing import Any

_MODULES = {
    "MemOptError": "errors",
    "UnsupportedModelError": "errors",
    "ConfigError": "plans.grammar",
    "PlanConfig": "plans.grammar",
    "Plan": "plans.table",
    "PlanTable": "plans.table",
    "MemOptOptions": "options",
    "MemOptTrainingArguments": "trainer_args",
    "MemOptTrainer": "trainer",
    "attach": "trainer",
    "optimize": "trainer",
    "run": "script",
    "run_summary": "trainer",
    "InputDensityCallback": "callbacks.input_density",
    "MemoryPhasesCallback": "callbacks.memory_phases",
    "PlanStatsCallback": "callbacks.plan_stats",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
