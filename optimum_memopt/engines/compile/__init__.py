"""The compile engine: memory plans on stock PyTorch, through torch.compile and a partitioner of AOTAutograd's own.

Importing this package imports nothing of torch's compilers; `create` does.
"""

from typing import Any

import torch

from optimum_memopt.engines.base import Engine, Selection

OLDEST_TORCH = (2, 9)


def missing() -> str:
    """Why this engine cannot work here and how to get it; empty when it can."""
    version = torch.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        return f"torch {version} is older than {'.'.join(map(str, OLDEST_TORCH))}; pip install -U torch"
    return ""


def declines(options: Any) -> str:
    """Empty: this engine does whatever plan the options ask for."""
    return ""


def create(options: Any) -> Engine:
    """An engine with the user's options, a `MemOptOptions`."""
    from optimum_memopt.engines.compile.engine import CompileEngine

    selection = Selection(options.plan_config, options.memory_opt_level, options.memory_opt_strict)
    return CompileEngine(selection, options.memory_opt_compiler)
