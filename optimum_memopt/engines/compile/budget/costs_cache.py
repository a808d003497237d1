"""Measured costs of operators on disk, so that a second run on the same machine measures nothing."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from optimum_memopt.engines.compile.budget.costs import Measured


def cache_path(device: torch.device) -> Path:
    """The file of a device under this version of torch."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimum_memopt"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {psutil.cpu_count()} cores {torch.get_num_threads()} threads"
    return folder / f"operators {name} torch {torch.__version__}.json".replace(" ", "-").replace("/", "-")


@contextlib.contextmanager
def known_costs(path: Path) -> Iterator[dict[str, Measured]]:
    """Costs by operator, to read and to add to; written back afterwards. A file that cannot be read is none.

    Args:
        path: see `cache_path`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {str(key): Measured(float(seconds), int(size)) for key, (seconds, size) in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        known = {}
    before = len(known)
    yield known
    if len(known) == before:
        return
    # Another process may write at the same time; one of the two files wins, whole.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as written:
            json.dump(known, written)
        Path(written.name).replace(path)
