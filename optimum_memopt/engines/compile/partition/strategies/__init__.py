"""The strategies of the compile engine: each file here registers its own."""

import importlib
import pkgutil

from optimum_memopt.engines.compile.partition.strategies.registry import registered, rewrite, strategy_of

__all__ = ["registered", "rewrite", "strategy_of"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
