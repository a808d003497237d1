"""Whether this torch is new enough, found without importing its compilers."""

import torch

OLDEST_TORCH = (2, 9)


def missing() -> str:
    """Why this engine cannot work here and how to get it; empty when it can."""
    version = torch.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        return f"torch {version} is older than {'.'.join(map(str, OLDEST_TORCH))}; pip install -U torch"
    return ""
