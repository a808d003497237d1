"""The engines, `compile` and `ort`, which register themselves when they are imported, and what they are built on."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")
