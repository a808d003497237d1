"""Costs of operators: from the machine's cache, from another rank, or measured now."""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from filelock import FileLock, Timeout

from optimum_memopt.compat import store_of_ranks
from optimum_memopt.engines.compile.costs.costs import Costs, Measured, measured, roofline, works
from optimum_memopt.engines.compile.costs.devices import Device
from optimum_memopt.engines.compile.graph.analyzed_graph import AnalyzedGraph
from optimum_memopt.memory.peak_monitor import held_bytes

if TYPE_CHECKING:
    from torch.distributed import Store


# Bytes that operators are measured with however little is left of a budget: without any measured rate all plans would
# seem to take no time.
_LEAST_MEASURED = 4 * 2**20
# Seconds that a rank waits for what another one measures, which takes two at most, behind the lock of a cache.
_RANK_WAIT = 60.0
# Seconds between two looks into the store.
_LOOK = 0.05
# Seconds that a process waits for the lock: those that start together measure one after the other, the later ones what
# is new to them, two seconds each at most (`measured`).
_LOCK_WAIT = 30.0
# No operator takes an hour, nor a buffer of 256 TiB.
_MOST_SECONDS, _MOST_BYTES = 3600, 2**48


def computed_once(store: "Store", name: str, compute: Callable[[], str], wait: float) -> str:
    """The text that the first rank that asks for `name` computes, and all others take from it.

    By the key-value store of the process group, not by a collective operation: that every rank would have to reach,
    also where only one of them compiles again.

    Args:
        compute: called on the first rank; on another one, if the first has failed or has not answered in time.
    """
    key = f"optimum_memopt/{hashlib.sha256(name.encode()).hexdigest()}"
    try:
        is_first = store.add(f"{key}/asked", 1) == 1
    # Not every store counts: torch's backend `fake` has none that does.
    except RuntimeError:
        return compute()
    if is_first:
        text = ""
        try:
            text = compute()
        finally:
            store.set(key, text)
        return text
    end = time.monotonic() + wait
    while not store.check([key]):
        if time.monotonic() > end:
            return compute()
        time.sleep(_LOOK)
    return store.get(key).decode() or compute()


def cache_folder() -> Path:
    """The user's cache of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "optimum_memopt"


def written_whole(path: Path, text: str) -> None:
    """Write a file that others read while it is written; a folder that cannot be written to has no cache."""
    # In a folder that goes whatever fails, as on a full disk.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(text, encoding="utf-8")
            written.replace(path)


def cache_path(device: torch.device) -> Path:
    """The file of a device under this version of torch."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {psutil.cpu_count()} cores {torch.get_num_threads()} threads"
    return cache_folder() / f"operators {name} torch {torch.__version__}.json".replace(" ", "-").replace("/", "-")


def _home() -> Path:
    try:
        return Path.home()
    # Neither HOME nor an entry for the user, as in a container that runs under any number.
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"optimum_memopt-{os.getuid()}"


@contextlib.contextmanager
def known_costs(path: Path) -> Iterator[dict[str, Measured]]:
    """Costs by operator, to read and to add to; written back afterwards. What is no cost in a file is left out, and
    measured again. Only one process has them at a time, where the file system has locks."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(path.with_suffix(".lock"), timeout=_LOCK_WAIT))
        cached = _read(path)
        before = len(cached)
        yield cached
        # For a reader that has not got the lock, too.
        if len(cached) > before:
            written_whole(path, json.dumps(cached))


def _read(path: Path) -> dict[str, Measured]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    # RecursionError: nested too deeply.
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: Measured(float(entry[0]), entry[1]) for key, entry in entries.items() if _is_cost(entry)}


def _is_cost(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    seconds, workspace = entry
    # Exact types, since true is a number of Python's; NaN compares as false.
    is_time = type(seconds) in (int, float) and 0 < seconds <= _MOST_SECONDS
    return is_time and type(workspace) is int and 0 <= workspace <= _MOST_BYTES


def costs_of(
    graph: AnalyzedGraph, device: torch.device, fused: bool, target: Device | None = None, most: int | None = None
) -> Costs:
    """The costs of all operators of a graph.

    Ranks with the same device plan with what one of them has measured, also on several machines: two measurements are
    never equal, and two plans may have different peaks.

    Args:
        fused: a compiler fuses what is bound by memory.
        target: estimate for this device instead.
        most: bytes that the process may hold while it measures; None: all that is available.
    """
    if target is not None:
        return roofline(graph.joint, graph.size_hints, target, fused)
    path, of_joint = cache_path(device), works(graph.joint, graph.size_hints)
    room = None if most is None else max(_LEAST_MEASURED, most - held_bytes(device))
    costs = partial(measured, graph.joint, graph.size_hints, of_joint, fused, room=room)
    if (store := store_of_ranks()) is None:
        with known_costs(path) as cached:
            return costs(cached)
    operators = sorted({work.key for work in of_joint if work is not None})

    def measure() -> str:
        with known_costs(path) as cached:
            costs(cached)
            return json.dumps({operator: cached[operator] for operator in operators if operator in cached})

    of_ranks = json.loads(computed_once(store, "\n".join((path.name, *operators)), measure, _RANK_WAIT))
    return costs({operator: Measured(*cost) for operator, cost in of_ranks.items()}, limit=0)
