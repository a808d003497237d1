"""Finds the device memory that this process may use, within the control groups of containers, Slurm and systemd."""

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil
import torch

from optimum_memopt.errors import MemOptError, excerpt
from optimum_memopt.sizes import gib_text


@dataclass(frozen=True)
class ControlGroup:
    """A control group whose processes, including those of nested groups, share a memory limit; bytes.

    Attributes:
        limit: the limit for all processes together.
        held: memory of all processes, without file pages that the kernel can drop; 0 if unknown.
    """

    limit: int
    held: int


# File names of limit and usage, and the prefix of keys in `memory.stat`, by file system type: versions 2 and 1
# (Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst in Linux).
_VERSIONS = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
_CONTROLLER = "memory"


def control_groups(root: Path) -> list[ControlGroup]:
    """Returns this process's groups with a limit, innermost first; `root` is the folder of `proc` and `sys`."""
    groups = []
    for kind, folder in _folders(root):
        of_limit, of_usage, prefix = _VERSIONS[kind]
        limit, usage = _text(folder / of_limit), _text(folder / of_usage)
        stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
        files = sum(int(stat.get(f"{prefix}{state}_file", 0)) for state in ("active", "inactive"))
        # "max" means no limit.
        if limit.isdigit():
            groups.append(ControlGroup(int(limit), max(0, int(usage) - files) if usage.isdigit() else 0))
    return groups


def _folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Yields file system type and folder of each of this process's groups."""
    # `4:memory:/docker/12ab` in version 1, `0::/user.slice/run.scope` in version 2.
    lines = (line.split(":", maxsplit=2) for line in _text(root / "proc/self/cgroup").splitlines())
    paths = {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    for mount in _text(root / "proc/self/mountinfo").splitlines():
        before, _, behind = mount.partition(" - ")
        (kind, *_, options), (top, place) = behind.split(), map(_unescaped, before.split()[3:5])
        has_memory = kind == "cgroup2" or (kind == "cgroup" and _CONTROLLER in options.split(","))
        path = paths.get("" if kind == "cgroup2" else _CONTROLLER)
        if not has_memory or path is None:
            continue
        if (inner := _inner(path, top)) is not None:
            for one in (inner, *inner.parents):
                yield kind, root / place.lstrip("/") / one


def _inner(path: str, top: str) -> PurePosixPath | None:
    """Returns a group's path relative to a mount of the group `top`; None if it lies outside of the mount.

    A container may see only a part of its host's groups.
    """
    # A cgroup namespace shows paths outside of it with "..".
    if ".." in (*PurePosixPath(path).parts, *PurePosixPath(top).parts):
        return PurePosixPath()
    with contextlib.suppress(ValueError):
        return PurePosixPath(path).relative_to(top)
    return None


def _unescaped(path: str) -> str:
    """Decode the octal escapes of `mountinfo` for spaces and backslashes."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


_ON_HOST = "LOCAL_WORLD_SIZE"
_ROOT = Path("/")
# The share of free memory that tensors can use: torch's caching allocator reserves 4 to 23% more than is allocated
# (RoBERTa, Llama with recompute; torch 2.13).
_ALLOCATED = 0.85


@dataclass(frozen=True)
class Capacity:
    """Memory of a device, in bytes.

    Attributes:
        total: the most that this process may use.
        available: memory for a training run, including memory that this process already holds, less the allocator's
            waste.
        elsewhere: memory held by other processes, and by libraries of this one.
    """

    total: int
    available: int
    elsewhere: int = 0

    def verdict(self, peak: int) -> str:
        """Returns `fits: 12.30 GiB of 13.60 GiB` for a step's peak in bytes; the limit is a budget of `auto`."""
        fits = "fits" if peak <= self.available else "does not fit"
        return f"{fits}: {gib_text(peak)} of {gib_text(self.available)}"


def capacity(device: torch.device) -> Capacity:
    """Returns the memory of a CUDA device, within `torch.cuda.set_per_process_memory_fraction`, or this process's
    share of the host.

    Raises:
        MemOptError: `LOCAL_WORLD_SIZE` is not a valid number of processes.
    """
    if device.type == "cuda":
        free, on_device = torch.cuda.mem_get_info(device)
        own = free + torch.cuda.memory_reserved(device)
        # The allocator refuses to reserve more.
        total = int(on_device * torch.cuda.memory.get_per_process_memory_fraction(device.index))
        return Capacity(total, int(min(own, total) * _ALLOCATED), max(0, on_device - own))
    memory, processes, groups = psutil.virtual_memory(), _processes(), control_groups(_ROOT)
    host = min([memory.total, *(group.limit for group in groups)])
    address_space, data = (_limit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    total = min(host // processes, address_space, data)
    own = psutil.Process().memory_info()
    # psutil has `data` on Linux only.
    free = min(memory.available // processes, data - getattr(own, "data", own.rss)) + own.rss
    # Shared memory is mostly files, including libraries, which no group's `held` includes.
    in_groups = ((group.limit - group.held) // processes + own.rss - own.shared for group in groups)
    available = max(0, min(total, free, *in_groups))
    return Capacity(total, available, total - available)


def _limit(kind: int) -> int:
    """Returns a soft limit of this process in bytes (setrlimit(2)); `sys.maxsize` if unlimited."""
    soft, _ = resource.getrlimit(kind)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def host_available() -> int:
    """Returns the bytes of host memory that this process may still use."""
    return capacity(torch.device("cpu")).available - psutil.Process().memory_info().rss


def capacity_of(total: int) -> Capacity:
    """Returns the capacity of a device of `total` bytes that is not in this machine and runs nothing else."""
    return Capacity(total, int(total * _ALLOCATED))


def _processes() -> int:
    """Returns the number of processes on this host, from the variable that torchrun, accelerate and DeepSpeed set."""
    text = os.environ.get(_ON_HOST, "").strip()
    if text and re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) is None:
        raise MemOptError(
            f"{_ON_HOST}={excerpt(text)}: allowed: whole numbers from 1 up, the processes on this host; launchers "
            "set it, unset it for a single process"
        )
    return int(text or 1)
